"""Llama 4, text, against `transformers`: logits, choices, gradients, conversion both ways, generation."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.round_trip import assert_comes_back
from tests.models.test_deepseek import IDS, in_transformers
from tests.models.test_gpt_oss import differences, noisy_model
from tests.models.test_qwen3 import exported
from tests.models.test_qwen3_moe import choices
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.inference.generate import DecodeSession
from titan_exp.models.convert.hf_config import from_huggingface, to_huggingface
from titan_exp.models.convert.hf_keys import PLAIN_ROUTER
from titan_exp.models.llama4 import Config, spec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.rope import RopeConfig

transformers = pytest.importorskip("transformers")

SHAPE = Config(
    name="tiny",
    architecture="llama4",
    layers=4,
    dim=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_dim=96,
    vocab_size=256,
    context=512,
    norm_eps=1e-5,
    tied_embeddings=False,
    rope=RopeConfig(500000.0, "llama3", 16.0, 1.0, 1.0, 16),
    init_std=0.02,
    attention_backend="math",
    chunk=8,
    nope_every=4,
    rotated_norm=True,
    temperature=0.1,
    temperature_floor=8,
    moe_every=2,
    moe=MoEConfig(
        experts=4,
        active_experts=1,
        ffn_dim=32,
        fp32_router=False,
        balance=BalanceConfig("none", 0.0, 0.0, 0.0, True),
        **{**PLAIN_ROUTER, "score": "sigmoid", "shared_experts": 1},
        normalized=False,
    ),
)
"""Sequences of 32 tokens are longer than chunks, the temperature's floor and the original context."""
WITHOUT = replace(
    SHAPE, rotated_norm=False, moe_every=1, temperature=0.0, rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 64)
)
"""The other of two values of each option."""
SHAPES = {"with": SHAPE, "without": WITHOUT}


@pytest.mark.proves("llama4", "logits", "gradients")
@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_choices_and_gradients_equal(tmp_path: Path, name: str, backend: str):
    config = SHAPES[name]
    ours = noisy_model(config, backend)
    theirs = in_transformers(exported(ours, config, tmp_path / "export"))
    assert type(theirs).__name__ == "Llama4ForCausalLM"
    own = choices(ours, "Router", lambda out: out.experts)
    their = choices(theirs, "Llama4Router", lambda out: out[1].topk(1).indices)
    found = differences(ours, theirs, config)
    assert found.pop("logits") < 1e-5
    assert all(value < 1e-4 for value in found.values()), found
    assert len(own) == len(their) == config.layers // config.moe_every
    assert all(torch.equal(mine, other) for mine, other in zip(own, their, strict=True))


@pytest.mark.proves("llama4", "import", "export")
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path):
    torch.manual_seed(0)
    values = to_huggingface(SHAPE, dtype="float32", special_tokens={})
    theirs = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**values)).eval()
    theirs.set_attn_implementation("eager")
    assert sum(parameter.numel() for parameter in theirs.parameters()) == spec(SHAPE).parameters == 181_312
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert_comes_back(theirs, replace(SHAPE, attention_backend="auto"), IDS, tmp_path)


@pytest.mark.proves("llama4", "generate")
def test_greedy_text_equals_token_by_token(tmp_path: Path):
    """With our cache, past chunks and steps of the temperature, and with that of `transformers`."""
    ours = noisy_model(SHAPE)
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            tensor.mul_(1 if "norm" in name else 3)  # else one token follows itself
    theirs = in_transformers(exported(ours, SHAPE, tmp_path / "export"))
    session, ids = DecodeSession(ours, 64, cache=True), IDS[0, :5].tolist()
    for _ in range(40):
        ids.append(int(session.next_logits(ids).argmax()))
    wanted = IDS[:1, :5]
    for _ in range(40):
        # Its own cache keeps whole chunks only where it knows the whole length.
        wanted = torch.cat((wanted, theirs(wanted, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    assert ids == wanted[0].tolist()
    assert len(set(ids[5:])) > 5


def test_config_json():
    values = json.loads(json.dumps(to_huggingface(SHAPE, dtype="bfloat16", special_tokens={})))
    published = {"no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3], "attention_chunk_size": 8, "use_qk_norm": True}
    assert {key: values[key] for key in published} == published
    assert from_huggingface(values, "tiny") == replace(SHAPE, attention_backend="auto")
    assert from_huggingface({**values, "no_rope_layers": []}, "tiny") == replace(SHAPE, attention_backend="auto")
    for key, other in (("no_rope_layers", [1, 0, 1, 0]), ("moe_layers", [0, 2])):
        with pytest.raises(UserError, match=key):
            from_huggingface({**values, key: other}, "x")


def test_the_language_model_of_a_multimodal_folder_is_read(tmp_path: Path):
    ours = noisy_model(SHAPE)
    folder = exported(ours, SHAPE, tmp_path / "export")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "vision_model.layernorm_pre.weight": torch.ones(4)}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    multimodal = {"model_type": "llama4", "text_config": values, "architectures": ["Llama4ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(multimodal))
    source = open_checkpoint(folder)
    assert source.model == replace(SHAPE, name="export", attention_backend="auto")
    for name, parameter in ours.named_parameters():
        assert torch.equal(source.parameters.read(name), parameter.detach()), name
