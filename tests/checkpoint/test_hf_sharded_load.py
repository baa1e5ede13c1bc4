from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.checkpoint.tools import exported, kind, weights
from tests.config.composing import experiment
from tests.models import test_deepseek as deepseek
from tests.models.deepseek_shapes import V3
from tests.ranks import run_ranks
from titan_exp.checkpoint.formats.open_checkpoint import load_hf_sharded
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.build import build_model
from titan_exp.parallel.apply import parallelize
from titan_exp.parallel.mesh import build_mesh
from titan_exp.parallel.meta_init import materialize_parameters
from titan_exp.trainer.distributed import joined_process_group

CPU = torch.device("cpu")


def read_sharded(name: str, folder: str, layout: list[str]) -> tuple[dict[str, torch.Tensor], int]:
    """Full parameters held by the ranks of a layout, and number of elements on this rank."""
    made = experiment(*layout, "model=llama_debug", "compile=none")
    with joined_process_group(CPU):
        with torch.device("meta"):
            model = build_model(kind(name), seq_len=64, attention_backend="math")
        mesh = build_mesh(made.parallelism, CPU)
        parallelize(model, mesh, ResolvedLayout.of(made), made.activation_checkpoint, made.compile)
        materialize_parameters(model, CPU)
        load_hf_sharded(model, kind(name), Path(folder))
        own = sum(
            parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
            for parameter in model.parameters()
        )
        whole = {
            name: value.full_tensor() if isinstance(value, DTensor) else value.detach()
            for name, value in model.named_parameters()
        }
        return whole, own


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3", ["parallelism.dp_shard=2"]),
        ("llama3_2", ["parallelism.dp_shard=3"]),
        ("llama3_1", ["parallelism.tp=2", "parallelism.dp_shard=1"]),
        ("llama3_1", ["parallelism.tp=2", "parallelism.dp_shard=2"]),
        ("llama3_2", ["parallelism.tp=2", "parallelism.dp_shard=1"]),
        ("llama3", ["parallelism.dp_replicate=2", "parallelism.dp_shard=2"]),
    ],
)
def test_ranks_hold_bitwise_what_one_device_reads(name: str, layout: list[str], tmp_path: Path):
    """A vocabulary of 97 and widths of 64 divide unevenly; tensor-parallel ranks share a single KV head."""
    folder = exported(name, "huggingface", tmp_path / "export", file_bytes=1e5)
    expected = weights(name)
    world = 1
    for word in layout:
        world *= int(word.split("=")[1])
    for found, own in run_ranks(world, read_sharded, name, str(folder), layout):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        assert own < 0.8 * sum(value.numel() for value in expected.values())


def test_one_device(tmp_path: Path):
    folder = exported("llama3", "huggingface", tmp_path / "export", dtype=torch.bfloat16)
    model = build_model(kind("llama3"), seq_len=64, attention_backend="math")
    load_hf_sharded(model, kind("llama3"), folder)
    for name, value in weights("llama3").items():
        found = model.get_parameter(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, value.bfloat16().float())


def test_only_the_slice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from titan_exp.checkpoint.formats.open_checkpoint import open_huggingface
    from titan_exp.checkpoint.formats.safetensors import SafetensorsReader

    source = open_huggingface(exported("llama3", "huggingface", tmp_path / "export"))
    read: list[int] = []
    plain = SafetensorsReader.read

    def counted(self, *args):
        part = plain(self, *args)
        read.append(part.numel())
        return part

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    part = source.parameters.read("blocks.0.feed_forward.gate_up.weight", slice(10, 50), slice(3, 7))
    assert torch.equal(part, weights("llama3")["blocks.0.feed_forward.gate_up.weight"][10:50, 3:7])
    assert sum(read) == part.numel() == 40 * 4


def test_another_model_is_refused_with_its_overrides(tmp_path: Path):
    folder = exported("llama3", "huggingface", tmp_path / "export")
    model = build_model(kind("llama2"), seq_len=64, attention_backend="math")
    with pytest.raises(
        UserError, match=r"(?s)They fit this one: model=llama_debug .*\n  model.kv_heads=4: \S+ has 2\n"
    ):
        load_hf_sharded(model, kind("llama2"), folder)


def test_another_context_takes_the_same_weights(tmp_path: Path):
    """YaRN changes the scale of latent attention's scores, and no weight."""
    published = deepseek.noisy_model(V3)
    folder = deepseek.exported(published, V3, tmp_path / "export")
    longer = replace(V3, rope=replace(V3.rope, factor=80.0), context=1280)
    model = build_model(longer, seq_len=64, attention_backend="math")
    load_hf_sharded(model, longer, folder)
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in published.state_dict().items())
    with pytest.raises(UserError, match=r"model.qk_rope_head_dim=16: \S+ has 8"):
        load_hf_sharded(model, replace(V3, qk_rope_head_dim=16, qk_nope_head_dim=8), folder)
