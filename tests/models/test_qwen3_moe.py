"""Qwen3 with experts against `transformers`, from the same weights, and back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.config.composing import experiment
from tests.models.round_trip import assert_comes_back
from tests.models.shapes import TINY, TINY_HUGGINGFACE
from tests.models.test_qwen3 import IDS, exported, noisy_model
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.mapping import ExportReader, ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.cli.convert import run as convert
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.qwen3_moe import Config, spec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.rope import ScaledRope
from titan_exp.rules import check

transformers = pytest.importorskip("transformers")

MOE = MoEConfig(
    experts=8,
    active_experts=3,
    ffn_dim=64,
    shared_experts=0,
    score="softmax",
    fp32_router=False,
    router_bias=False,
    normalized=True,
    scale=1.0,
    groups=1,
    active_groups=1,
    group_score="max",
    balance=BalanceConfig("global_batch", 0.001, 0.0, 0.0, True),
)
CHANGES = {
    "architecture": "qwen3_moe",
    "head_dim": 32,
    "norm_eps": 1e-6,
    "rope": ScaledRope(1e6),
    "attention_backend": "math",
    "moe": MOE,
}
SHAPE = Config(**{key: value for key, value in {**vars(TINY), **CHANGES}.items() if key != "ffn_dim"})
"""Two groups of gate and up rows per expert; heads wider than dim / heads."""

THEIRS = {
    **TINY_HUGGINGFACE,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "experts_implementation": "eager",
}


def in_transformers(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in memory of `transformers`, which stacks experts with gate before up, under the names of its files."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, weight in enumerate(tensor):
                found[f"{prefix}.{expert}.gate_proj.weight"], found[f"{prefix}.{expert}.up_proj.weight"] = weight.chunk(
                    2
                )
        elif last == "down_proj":
            found |= {f"{prefix}.{expert}.down_proj.weight": weight for expert, weight in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def choices(model: nn.Module, kind: str, result: Callable[[Any], Tensor]) -> list[Tensor]:
    """Sorted experts of each token by layer, filled by the next forward pass."""
    found: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_hook(lambda _, __, out: found.append(result(out).sort(dim=-1).values))
    return found


@pytest.mark.proves("qwen3_moe", "logits", "gradients")
@pytest.mark.parametrize(("tied", "normalized"), [(False, True), (True, False)])
def test_logits_gradients_and_choices_equal(tmp_path: Path, tied: bool, normalized: bool):
    config = replace(SHAPE, tied_embeddings=tied, moe=replace(MOE, normalized=normalized, active_experts=2))
    ours = noisy_model(config).eval()
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    own_choices = choices(ours, "Router", lambda out: out.experts)
    their_choices = choices(theirs, "Qwen3MoeTopKRouter", lambda out: out[2])
    labels = IDS.roll(-1, dims=1).flatten()
    logits, expected = ours(IDS), theirs(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert len(own_choices) == config.layers
    for found, wanted in zip(own_choices, their_choices, strict=True):
        assert torch.equal(found, wanted)
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), labels).backward()
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = ImportReader(TorchFileReader(per_expert(named)), state_dict_map(config, "huggingface"))
    for name, parameter in ours.named_parameters():
        wanted = gradients.read(name)
        assert parameter.grad is not None
        assert wanted.norm() > 0
        own, their = (side if side.dim() > 2 else side[None] for side in (parameter.grad, wanted))
        # Each expert of its own: the error of one that few tokens chose would not show in the whole.
        for expert in range(len(own)):
            assert (own[expert] - their[expert]).norm() <= 1e-4 * their[expert].norm(), (name, expert)


@pytest.mark.proves("qwen3_moe", "import", "export")
@pytest.mark.parametrize("tied", [False, True])
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path, tied: bool):
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**THEIRS, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if "norm" not in name else 0.2 * torch.rand(()))
    assert_comes_back(
        theirs, replace(SHAPE, tied_embeddings=tied, attention_backend="auto"), IDS, tmp_path, file_bytes=1e5
    )


def _renamed(name: str, mutation: str) -> str:
    if mutation == "gate and up":
        swap = {"gate": "up", "up": "gate"}
        return re.sub(r"(gate|up)_proj", lambda found: f"{swap[found[1]]}_proj", name)
    return re.sub(r"experts.(\d)", lambda found: f"experts.{(int(found[1]) + 1) % 8}", name)


@pytest.mark.parametrize("mutation", ["gate and up", "order of experts", "rows and columns", "one expert"])
def test_mutations_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutation: str):
    """A round trip hides each of them: only another implementation tells."""
    plain = ExportReader.read

    def mutated(self: ExportReader, name: str) -> Tensor:
        if "experts" not in name:
            return plain(self, name)
        if mutation == "rows and columns":
            return plain(self, name).t().contiguous()
        if mutation == "one expert":
            return plain(self, name) * (".experts.5." not in name)
        return plain(self, _renamed(name, mutation))

    ours = noisy_model(SHAPE)
    monkeypatch.setattr(ExportReader, "read", mutated)
    theirs = in_transformers(exported(ours, SHAPE, tmp_path / "export"))
    with torch.no_grad():
        assert (ours(IDS) - theirs(IDS).logits).abs().max() > 1e-2


def test_a_missing_expert_is_named(tmp_path: Path):
    folder = exported(noisy_model(SHAPE), SHAPE, tmp_path / "export")
    _edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    with pytest.raises(UserError, match=r"missing: model.layers.1.mlp.experts.7.up_proj.weight \[64, 64\]"):
        open_checkpoint(folder)


def test_a_transposed_expert_is_named(tmp_path: Path):
    config = replace(SHAPE, moe=replace(MOE, ffn_dim=32))
    folder = exported(noisy_model(config), config, tmp_path / "export")
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    _edit(folder, lambda tensors: tensors.update({name: tensors[name].t().contiguous()}))
    with pytest.raises(UserError, match=rf"shape: {name} is \[32, 64\], and \[64, 32\] in the model"):
        open_checkpoint(folder)


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    from safetensors.torch import save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_config_json(tmp_path: Path):
    """Keys of the published files; the class's default of norm_topk_prob is false."""
    config = experiment("model=qwen3_30b_a3b").model
    values = to_huggingface(config, dtype="bfloat16", special_tokens={})
    assert values["model_type"] == "qwen3_moe"
    published = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 128,
        "num_key_value_heads": 4,
    }
    assert {key: values[key] for key in published} == published
    assert from_huggingface(json.loads(json.dumps(values)), config.name) == config
    by_default = {key: value for key, value in values.items() if key != "norm_topk_prob"}
    found = from_huggingface(by_default, "x")
    assert isinstance(found, Config)
    assert not found.moe.normalized


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "do not have rope scaling 'dynamic'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], says: str):
    values = to_huggingface(SHAPE, dtype="float32", special_tokens={})
    with pytest.raises(UserError, match=says):
        from_huggingface({**values, **changes}, "x")


@pytest.mark.parametrize(
    "changes", [{"score": "sigmoid"}, {"shared_experts": 1}, {"groups": 4, "active_groups": 2}, {"scale": 2.5}]
)
def test_a_router_that_transformers_lacks_is_not_exported(tmp_path: Path, changes: dict[str, Any]):
    config = replace(SHAPE, moe=replace(MOE, **changes))
    with pytest.raises(UserError, match=rf"model.moe.{next(iter(changes))}="):
        exported(noisy_model(config), config, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_convert_writes_own_names_where_transformers_has_no_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = replace(SHAPE, moe=replace(MOE, score="sigmoid"))
    tensors = {name: parameter.detach() for name, parameter in noisy_model(config).named_parameters()}
    source = OpenCheckpoint(Path("memory"), "torch", config, TorchFileReader(tensors))
    export_weights(source, tmp_path / "dcp", ExportOptions("dcp"))
    with pytest.raises(UserError, match="Use format=safetensors, torch or dcp"):
        convert([str(tmp_path / "dcp"), str(tmp_path / "out"), "format=huggingface"])
    assert convert([str(tmp_path / "dcp"), str(tmp_path / "out")]) == 0
    assert open_checkpoint(tmp_path / "out").format == "safetensors"
    assert open_checkpoint(tmp_path / "out").model == config


def test_the_rules_know_before_training():
    words = ["model=qwen3_moe_debug", "checkpoint.export=bf16"]
    check(experiment(*words))
    with pytest.raises(UserError, match=r"model.moe.score=sigmoid(.|\n)*or set checkpoint.export=none"):
        check(experiment(*words, "model.moe.score=sigmoid"))


def test_the_spec_has_every_parameter_and_buffer():
    config = replace(SHAPE, moe=replace(MOE, router_bias=True, shared_experts=2))
    with torch.device("meta"):
        model = build_model(config, seq_len=16, attention_backend="math")
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    training = {name for name in found if name.endswith(".previous_load")}
    assert len(training) == config.layers
    assert spec(config).state_shapes == {name: shape for name, shape in found.items() if name not in training}
    assert state_dict_map(config, "huggingface").shapes == spec(config).state_shapes
