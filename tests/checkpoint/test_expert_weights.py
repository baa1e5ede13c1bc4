"""Weights of experts, with router biases and shared experts, in Hugging Face's folders: written and read by shards."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_sharded_hf_export import SAVING, small_files_and_counted_bytes, tensors
from tests.models.own_moe_family import Config
from tests.models.test_qwen3_moe import MOE, SHAPE
from tests.parity.runs import train
from tests.patching import patch
from titan_exp.checkpoint.formats import mapping, torch_file
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.formats.safetensors import SafetensorsReader
from titan_exp.checkpoint.formats.torch_file import DCPTensorReader, TorchFileReader
from titan_exp.checkpoint.load_state import is_training_state
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.build import build_model
from titan_exp.models.convert.state_dict_map import state_dict_map

FAMILY = "tests.models.own_moe_family"
EXPERTS = (
    f"model=qwen3_moe_debug model.architecture={FAMILY} model.layers=2 model.moe.score=sigmoid "
    "model.moe.router_bias=true model.moe.shared_experts=1 model.moe.balance.bias_rate=1e-2"
)
LAYOUTS = [
    "parallelism.dp_shard=3 training.global_batch_size=12",
    "parallelism.dp_shard=4 parallelism.ep=2",
    "parallelism.tp=2 parallelism.ep=2 parallelism.dp_shard=1",
    "parallelism.tp=2 parallelism.etp=2 parallelism.dp_shard=2 parallelism.ep=2",
    "parallelism.dp_replicate=2 parallelism.dp_shard=2 parallelism.ep=2 training.micro_batch_size=1",
    "parallelism.pp=2 parallelism.dp_shard=2 parallelism.ep=2",
]
CONFIG = Config(
    **{
        **vars(SHAPE),
        "architecture": FAMILY,
        "moe": replace(MOE, experts=6, router_bias=True, shared_experts=2, ffn_dim=96),
    }
)
GATE_UP, DOWN = (f"blocks.1.feed_forward.experts.{name}.weight" for name in ("gate_up", "down"))
BIAS = "blocks.1.feed_forward.router.bias"


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = state_dict_map(CONFIG, "huggingface").shapes
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def exported(folder: Path, **settings: Any) -> Path:
    source = OpenCheckpoint(Path("memory"), "torch", CONFIG, TorchFileReader(weights()))
    export_weights(source, folder, ExportOptions("huggingface", **settings))
    return folder


@pytest.mark.night
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_a_layout_equals_convert(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run"
    words = [*EXPERTS.split(), *layout.split(), "checkpoint.export=bf16"]
    train(path, *SAVING, *words, mutate=small_files_and_counted_bytes)
    assert convert_command([str(path), str(tmp_path / "converted"), "dtype=bf16", "--trust"]) == 0
    (folder,) = (path / "export").iterdir()
    found, expected = tensors(folder), tensors(tmp_path / "converted")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert tensor.dtype == (torch.float32 if "bias" in name else torch.bfloat16)
        assert tensor.count_nonzero() > 0.9 * tensor.numel() or "bias" in name, name
    biases = [tensor for name, tensor in expected.items() if "e_score_correction_bias" in name]
    assert len(biases) == 2
    assert all(bias.any() for bias in biases)
    # Each row once.
    assert sum(int(file.read_text()) for file in path.glob("bytes-*")) == sum(map(len, map(_bytes, found.values())))


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8)


def count_read_bytes(path: str, part: str = ".experts.") -> None:
    """Write how many bytes of tensors with this part in their name the rank reads."""
    folder, read = Path(path), [0]

    def counted(plain: Any) -> Any:
        def reader(self: SafetensorsReader, name: str, *window: slice) -> Tensor:
            found = plain(self, name, *window)
            if part in name:
                read[0] += found.nbytes
            (folder / f"read-{os.environ['RANK']}").write_text(str(read[0]))
            return found

        return reader

    patch("titan_exp.checkpoint.formats.safetensors.SafetensorsReader.read", counted)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[] if place == 3 else pytest.mark.night) for place, layout in enumerate(LAYOUTS)],
)
def test_ranks_read_only_their_experts(tmp_path: Path, layout: str):
    path, words = tmp_path / "first", [*EXPERTS.split(), "checkpoint.mode=sync", "model.vocab_size=257"]
    first = train(path, *words, "training.steps=2", "checkpoint.export=fp32")
    (folder,) = (path / "export").iterdir()
    start = [f"checkpoint.initial={folder}", "training.steps=0"]
    second = train(
        tmp_path / "second", *words, *layout.split(), *start, mutate=partial(count_read_bytes, str(tmp_path))
    )
    assert second.disputed == []
    assert second.weights.keys() == first.weights.keys()
    loaded = {name: weight for name, weight in first.weights.items() if not is_training_state(name)}
    assert loaded["blocks.1.feed_forward.router.bias"].any()
    for name, weight in loaded.items():
        assert torch.equal(second.weights[name], weight), name
    counts = [int(file.read_text()) for file in tmp_path.glob("read-*")]
    total = sum(weight.nbytes for name, weight in first.weights.items() if ".experts." in name)
    replicas = 2 if "dp_replicate=2" in layout else 1
    assert sum(counts) == replicas * total
    assert max(counts) < 0.6 * total


def unwritten_experts() -> None:
    from titan_exp.checkpoint.formats import sharded_hf_export

    def second_only(plain: Any) -> Any:
        return lambda tensor, mesh: plain(tensor, mesh) and (tensor.dim() < 3 or mesh.dp_rank == 1)

    patch(f"{sharded_hf_export.__name__}.is_first_replica", second_only)


def test_an_export_that_lacks_experts_fails(tmp_path: Path):
    """Files are preallocated, so that rows which no rank writes would be zeros."""
    words = [*EXPERTS.split(), "parallelism.dp_shard=2", "parallelism.ep=2", "checkpoint.export=bf16"]
    with pytest.raises(AssertionError, match="could not export"):
        train(tmp_path, *SAVING, *words, mutate=unwritten_experts)
    assert list((tmp_path / "export").iterdir()) == []


@pytest.mark.parametrize(
    "window",
    [
        (slice(2, 5),),
        (slice(1, 3), slice(40, 100)),
        (slice(0, 6), slice(32, 64), slice(5, 9)),
        (slice(3, 3),),
        (slice(4, 6), slice(None), slice(7, 8)),
        (),
    ],
)
def test_windows_of_stacked_weights(tmp_path: Path, window: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch):
    source, expected = open_checkpoint_of(exported(tmp_path / "export", file_bytes=1e5)), weights()
    read: list[int] = []
    plain = SafetensorsReader.read

    def counted(self: SafetensorsReader, name: str, *slices: slice) -> Tensor:
        found = plain(self, name, *slices)
        read.append(found.numel())
        return found

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    for name in (GATE_UP, DOWN):
        read.clear()
        found = source.parameters.read(name, *window)
        assert torch.equal(found, expected[name][window])
        assert sum(read) == found.numel()
    assert torch.equal(source.parameters.read(BIAS, slice(1, 4)), expected[BIAS][1:4])


def open_checkpoint_of(folder: Path) -> OpenCheckpoint:
    from titan_exp.checkpoint.formats.open_checkpoint import open_huggingface

    return open_huggingface(folder, FAMILY)


@pytest.mark.parametrize("held", [16_000, 100_000, 2**28], ids=["one expert", "a few", "all"])
def test_every_format_roundtrips_bitwise(tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mapping, "HELD_BYTES", held)
    monkeypatch.setattr(torch_file, "CHUNK_BYTES", held)
    source = open_checkpoint_of(exported(tmp_path / "0", file_bytes=1e5))
    for number, form in enumerate(("dcp", "safetensors", "huggingface", "torch"), start=1):
        target = tmp_path / (f"{number}.pt" if form == "torch" else str(number))
        export_weights(source, target, ExportOptions(form))
        source = open_checkpoint_of(target) if form == "huggingface" else open_checkpoint(target, trust=True)
        for name, tensor in weights().items():
            assert torch.equal(source.parameters.read(name), tensor), (form, name)
    assert tensors(tmp_path / "3").keys() == tensors(tmp_path / "0").keys()


@pytest.mark.parametrize("form", ["dcp", "safetensors", "huggingface", "torch"])
def test_biases_keep_fp32(tmp_path: Path, form: str):
    source = OpenCheckpoint(Path("memory"), "torch", CONFIG, TorchFileReader(weights()))
    target = tmp_path / ("x.pt" if form == "torch" else "x")
    export_weights(source, target, ExportOptions(form, torch.bfloat16))
    found = open_checkpoint_of(target) if form == "huggingface" else open_checkpoint(target, trust=True)
    assert found.parameters.dtype(GATE_UP) == torch.bfloat16
    assert found.parameters.dtype(BIAS) == torch.float32
    assert torch.equal(found.parameters.read(BIAS), weights()[BIAS])


def test_every_row_of_ours_is_one_of_theirs():
    """By numbers: each element of theirs once, and gate and up rows in groups of 32."""
    row_map = state_dict_map(CONFIG, "huggingface")
    theirs, at = {}, 0
    for name, shape in row_map.their_shapes.items():
        count = torch.Size(shape).numel()
        theirs[name], at = torch.arange(at, at + count).view(shape), at + count
    ours = ImportReader(TorchFileReader(theirs), row_map)
    found = torch.cat([ours.read(name).flatten() for name in row_map.shapes])
    assert torch.equal(found.sort().values, torch.arange(at))
    fused, prefix = ours.read(GATE_UP), "model.layers.1.mlp.experts.4"
    assert torch.equal(fused[4, 32:64], theirs[f"{prefix}.up_proj.weight"][:32])
    assert torch.equal(fused[4, 64:96], theirs[f"{prefix}.gate_proj.weight"][32:64])
    for name in row_map.their_shapes:
        assert row_map.of_theirs(name)[0].ours == row_map.owner(name)


def test_conversion_holds_some_experts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In both directions: neither a whole stacked weight, nor a saved chunk once per expert."""
    monkeypatch.setattr(mapping, "HELD_BYTES", 100_000)
    monkeypatch.setattr(torch_file, "CHUNK_BYTES", 100_000)
    sizes, reads = list[int](), list[str]()
    plain, of_dcp = ImportReader.read, DCPTensorReader.read

    def imported(self: ImportReader, name: str, *window: slice) -> Tensor:
        found = plain(self, name, *window)
        sizes.append(found.nbytes)
        return found

    def from_dcp(self: DCPTensorReader, name: str, *window: slice) -> Tensor:
        found = of_dcp(self, name, *window)
        sizes.append(found.nbytes)
        reads.append(name)
        return found

    monkeypatch.setattr(ImportReader, "read", imported)
    monkeypatch.setattr(DCPTensorReader, "read", from_dcp)
    export_weights(open_checkpoint_of(exported(tmp_path / "0")), tmp_path / "dcp", ExportOptions("dcp"))
    export_weights(open_checkpoint(tmp_path / "dcp", trust=True), tmp_path / "1", ExportOptions("huggingface"))
    whole = weights()[GATE_UP]
    assert max(sizes) == whole.nbytes // 3
    # Two experts of 49 kB in a chunk, so three reads of six experts; of down four experts, in two reads.
    assert (reads.count(GATE_UP), reads.count(DOWN)) == (3, 2)


def test_a_model_with_other_experts_is_refused_by_its_key(tmp_path: Path):
    from titan_exp.checkpoint.formats.open_checkpoint import load_hf_sharded

    folder = exported(tmp_path / "export")
    other = replace(CONFIG, moe=replace(CONFIG.moe, experts=8))
    with pytest.raises(UserError, match=r"model.moe.experts=8: .*/export has 6"):
        load_hf_sharded(build_model(other, seq_len=16, attention_backend="math"), other, folder)


def test_training_state_is_no_weight(tmp_path: Path):
    """The load of the last step is saved, and neither exported nor needed in a folder to start from."""
    words = ["model=qwen3_moe_debug", "model.layers=2", "model.vocab_size=257", "checkpoint.mode=sync"]
    words += ["model.moe.balance.loss=global_batch", "training.steps=1"]
    train(tmp_path / "first", *words, "checkpoint.export=fp32")
    saved = DCPTensorReader(CheckpointFolder(tmp_path / "first/checkpoints").path_of(1))
    assert "blocks.0.feed_forward.router.previous_load" in saved.shapes
    (folder,) = (tmp_path / "first/export").iterdir()
    assert not any("load" in name for name in tensors(folder))
    assert convert_command([str(folder), str(tmp_path / "dcp"), "format=dcp"]) == 0
    for number, initial in enumerate((tmp_path / "dcp", folder, tmp_path / "first")):
        found = train(tmp_path / f"second-{number}", *words, f"checkpoint.initial={initial}")
        assert found.disputed == []
