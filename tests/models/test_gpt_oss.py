"""GPT-OSS against `transformers`: logits, choices, gradients, conversion both ways, generation."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.round_trip import assert_comes_back
from tests.models.test_deepseek import IDS, in_transformers
from tests.models.test_qwen3 import exported
from tests.models.test_qwen3_moe import choices
from titan_exp.checkpoint.formats.mapping import ImportReader
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.build import build_model
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface
from titan_exp.models.convert.hf_keys import PLAIN_ROUTER, read_rope
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.gpt_oss import Config, spec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.rope import YarnRope

transformers = pytest.importorskip("transformers")

SHAPE = Config(
    name="tiny",
    architecture="gpt_oss",
    layers=2,
    dim=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=256,
    context=16384,
    norm_eps=1e-5,
    tied_embeddings=False,
    rope=read_rope(
        {"rope_theta": 150000.0, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False}},
        512,
        YarnRope,
    ),
    init_std=0.02,
    attention_backend="math",
    window=8,
    swiglu_alpha=1.702,
    swiglu_limit=0.5,
    moe=MoEConfig(
        experts=4,
        active_experts=2,
        ffn_dim=64,
        fp32_router=False,
        balance=BalanceConfig("none", 0.0, 0.0, 0.0, True),
        **PLAIN_ROUTER,
        normalized=True,
    ),
)
"""Sequences of 32 tokens are longer than the window; rounding would move the ramp of YaRN; inputs exceed the limit."""


def noisy_model(config: ModelConfig, backend: Any = "math") -> nn.Module:
    """Weights of a few tenths, norms around one, biases and sinks around zero: ones and zeros would hide errors."""
    model = build_model(config, seq_len=64, attention_backend=backend)
    model.reset_buffers()  # type: ignore[operator]  # the decoder's own
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 1.0 if "sinks" in name or name.endswith("bias") else 0.1
            tensor.copy_(1 + 0.2 * noise if "norm" in name else scale * noise)
            if "sinks" in name:
                tensor[0] = 120  # overflows unless the softmax subtracts it
    return model


def differences(ours: nn.Module, theirs: Any, config: ModelConfig) -> dict[str, float]:
    """Relative difference of the logits, and of the gradient of each parameter."""
    labels = IDS.roll(-1, dims=1).flatten()
    logits, expected = ours(IDS), theirs(IDS).logits
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), labels).backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    reader = ImportReader(TorchFileReader(their_gradients), state_dict_map(config, "huggingface"))
    found = {"logits": float((logits - expected).detach().abs().max())}
    for name, parameter in ours.named_parameters():
        wanted = reader.read(name)
        assert wanted.norm() > 0
        gradient = torch.zeros_like(wanted) if parameter.grad is None else parameter.grad
        found[name] = float((gradient - wanted).detach().norm() / wanted.norm())
    return found


@pytest.mark.proves("gpt_oss", "logits", "gradients")
@pytest.mark.parametrize(("backend", "tied"), [("math", False), ("flash", True)])
def test_logits_choices_and_gradients_equal(tmp_path: Path, backend: str, tied: bool):
    config = replace(SHAPE, tied_embeddings=tied)
    ours = noisy_model(config, backend)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == "GptOssForCausalLM"
    own, their = (
        choices(ours, "Router", lambda out: out.experts),
        choices(theirs, "GptOssTopKRouter", lambda out: out[2]),
    )
    found = differences(ours, theirs, config)
    assert found.pop("logits") < 1e-5
    assert all(value < 1e-4 for value in found.values()), found
    assert len(own) == len(their) == config.layers
    assert all(torch.equal(mine, other) for mine, other in zip(own, their, strict=True))


@pytest.mark.proves("gpt_oss", "import", "export")
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path):
    torch.manual_seed(0)
    values = to_huggingface(SHAPE, dtype="float32", special_tokens={})
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**values)).eval()
    theirs.set_attn_implementation("eager")
    assert sum(parameter.numel() for parameter in theirs.parameters()) == spec(SHAPE).parameters
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    assert_comes_back(theirs, replace(SHAPE, attention_backend="auto"), IDS, tmp_path)


def quantized(folder: Path) -> dict[str, Tensor]:
    """Rewrite the experts' weights of a folder as published; returns the exact values."""
    generator = torch.Generator().manual_seed(2)
    tensors, exact = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            exact[name] = tensor
            continue
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator)
        scales = torch.randint(120, 126, blocks.shape[:3], generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        weight = torch.zeros(experts, inputs, outputs)
        for index in torch.cartesian_prod(*map(torch.arange, (experts, outputs, inputs))).tolist():
            expert, out, place = index
            byte = int(blocks[expert, out, place // 32, place % 32 // 2])
            value = byte >> 4 if place % 2 else byte & 15
            sign = -1.0 if value & 8 else 1.0
            weight[expert, place, out] = (
                sign * magnitude[value & 7] * 2.0 ** (int(scales[expert, out, place // 32]) - 127)
            )
        exact[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def test_published_mxfp4_blocks_are_read_exactly(tmp_path: Path):
    """As written out here element by element, and as `transformers` dequantizes them; windows as the whole."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = replace(SHAPE, layers=1, dim=96, moe=replace(SHAPE.moe, experts=2))
    folder = exported(noisy_model(config), config, tmp_path / "published")
    exact = quantized(folder)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert torch.equal(theirs.float(), exact[name])
    source = open_checkpoint(folder)
    expected = ImportReader(TorchFileReader(exact), state_dict_map(config, "huggingface"))
    for ours in expected.shapes:
        found = source.parameters.read(ours)
        assert torch.equal(found.float(), expected.read(ours)), ours
    for ours, window in (
        ("blocks.0.feed_forward.experts.gate_up.weight", (slice(1, 2), slice(30, 70), slice(20, 71))),
        ("blocks.0.feed_forward.experts.down.weight", (slice(0, 2), slice(5, 6), slice(33, 64))),
        ("blocks.0.feed_forward.experts.gate_up.bias", (slice(1, 2), slice(31, 65))),
    ):
        assert torch.equal(source.parameters.read(ours, *window).float(), expected.read(ours)[window]), ours
    assert source.parameters.dtype("blocks.0.feed_forward.experts.down.weight") == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "has no .*_scales. Download"),
        (lambda tensors, name: tensors.pop(f"{name}_blocks"), "has no .*_blocks"),
        (lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][:, :-1]}), r"MXFP4 has"),
        (lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"].float()}), "not uint8"),
    ],
)
def test_damaged_mxfp4_is_refused(tmp_path: Path, change: Callable[[dict[str, Tensor], str], object], says: str):
    config = replace(SHAPE, layers=1, dim=32, moe=replace(SHAPE.moe, experts=2, ffn_dim=32))
    folder = exported(noisy_model(config), config, tmp_path / "published")
    quantized(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.down_proj")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=says):
        open_checkpoint(folder)


@pytest.mark.proves("gpt_oss", "generate")
def test_greedy_text_equals_token_by_token(tmp_path: Path):
    """With our cache, past the window, and with that of `transformers`."""
    ours = noisy_model(SHAPE)
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            tensor.mul_(1 if "norm" in name or "sinks" in name else 10)  # else one token follows itself
    theirs = in_transformers(exported(ours, SHAPE, tmp_path / "export"))
    session, ids = DecodeSession(ours, 64, cache=True), IDS[0, :5].tolist()
    for _ in range(40):
        ids.append(int(session.next_logits(ids).argmax()))
    wanted = theirs.generate(IDS[:1, :5], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ids == wanted[0].tolist()
    assert len(set(ids[5:])) > 5


def test_config_json():
    """Keys of the published files, YaRN nested as in both versions of `transformers`."""
    values = to_huggingface(SHAPE, dtype="bfloat16", special_tokens={})
    published = {"swiglu_limit": 0.5, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert {key: values[key] for key in published} == published
    assert values["layer_types"] == ["sliding_attention", "full_attention"]
    assert values["rope_scaling"]["truncate"] is False
    assert from_huggingface(json.loads(json.dumps(values)), "tiny") == replace(SHAPE, attention_backend="auto")
    scaling = {key: value for key, value in values["rope_scaling"].items() if "mscale" not in key}
    plain = {key: value for key, value in values.items() if not key.startswith("swiglu")}
    found = from_huggingface({**plain, "rope_scaling": scaling}, "x")
    assert isinstance(found, Config)
    assert (found.rope, found.swiglu_alpha, found.swiglu_limit) == (SHAPE.rope, 1.702, 7.0)
    with pytest.raises(UserError, match="layer_types"):
        from_huggingface({**values, "layer_types": ["full_attention", "sliding_attention"]}, "x")
