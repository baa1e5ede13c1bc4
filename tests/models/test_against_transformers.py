"""Our decoder against the Llama of `transformers`, from the same weights: one implementation nobody here wrote."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models.shapes import TINY, TINY_HUGGINGFACE, real_model
from titan_exp.config.errors.user_error import UserError
from titan_exp.models.convert.hf_keys import read_rope, rope_keys, written
from titan_exp.models.spec.rope import RopeConfig, ScaledRope
from titan_exp.ops.attention.rope import Frequencies
from titan_exp.ops.swiglu import GROUP

transformers = pytest.importorskip("transformers")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

LLAMA3_1 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)
LINEAR = replace(LLAMA3_1, scaling="linear", factor=4.0)
YARN = replace(LINEAR, scaling="yarn")
SCALINGS = [
    LLAMA3_1,
    LINEAR,
    YARN,
    replace(YARN, theta=1e4, original_context=4096, beta_fast=16.0, beta_slow=2.0, truncate=False),
    replace(YARN, mscale=0.707, mscale_all_dim=1.0),
    # Combinations that transformers reads as an attention factor.
    replace(YARN, mscale=0.0),
    replace(YARN, mscale=0.5, mscale_all_dim=0.0),
]


def keys_of(rope: RopeConfig) -> dict[str, Any]:
    return written(rope_keys(RopeConfig), SimpleNamespace(rope=rope, context=128))


@pytest.mark.parametrize("rope", SCALINGS)
def test_scaled_frequencies_equal_and_come_back(rope: RopeConfig):
    keys = keys_of(rope)
    assert keys["max_position_embeddings"] == rope.longest(128)
    config = transformers.LlamaConfig(**{**TINY_HUGGINGFACE, **keys}, head_dim=16)
    wanted, magnitude = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    found = Frequencies(**rope.frequencies)
    torch.testing.assert_close(found.inverse(16).float(), wanted, atol=0, rtol=1e-6)
    assert found.magnitude == pytest.approx(magnitude, rel=1e-12)
    back = read_rope(keys, keys["max_position_embeddings"], RopeConfig)
    assert (back, back.longest(keys["max_position_embeddings"])) == (rope, rope.longest(128))


def test_the_attention_factor_of_others_is_kept():
    keys = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25}}
    assert read_rope(keys, 4096, ScaledRope).magnitude == pytest.approx(1.25, rel=1e-9)
    keys["rope_parameters"]["attention_factor"] = 0.5
    with pytest.raises(UserError, match=r"attention_factor=0\.5 must be at least 1"):
        read_rope(keys, 4096, ScaledRope)


@pytest.mark.proves("llama", "logits", "gradients")
@pytest.mark.parametrize(
    ("rope", "tied"), [(TINY.rope, False), (LLAMA3_1, False), (YARN, False), (LINEAR, False), (TINY.rope, True)]
)
def test_logits_and_gradients_equal(rope, tied):
    ours = real_model(rope=rope, tied_embeddings=tied, seq_len=128)
    theirs = llama(rope, tied).eval()
    theirs.load_state_dict(renamed(ours.state_dict(), tied))
    ids = torch.randint(0, 97, (2, 128))
    logits, expected = ours(ids), theirs(ids).logits
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), ids.roll(-1, dims=1).flatten()).backward()
    gradients = renamed({name: parameter.grad for name, parameter in ours.named_parameters()}, tied)
    for name, parameter in theirs.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() > 0, name


def llama(rope: RopeConfig, tied: bool):
    shape = {**TINY_HUGGINGFACE, **keys_of(rope), "head_dim": 16, "rms_norm_eps": 1e-5}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=tied))


def renamed(ours: Mapping[str, Any], tied: bool) -> dict[str, torch.Tensor]:
    state = {"model.embed_tokens.weight": ours["embedding.weight"], "model.norm.weight": ours["norm.weight"]}
    state["lm_head.weight"] = ours["embedding.weight"] if tied else ours["head.weight"]
    for layer in range(2):
        block, to = f"blocks.{layer}", f"model.layers.{layer}"
        groups = ours[f"{block}.attention.qkv.weight"].view(2, 2 + 2, 16, 64)
        query, key, value = groups.split((2, 1, 1), dim=1)
        for name, part in (("q", query), ("k", key), ("v", value)):
            state[f"{to}.self_attn.{name}_proj.weight"] = part.reshape(-1, 64)
        state[f"{to}.self_attn.o_proj.weight"] = ours[f"{block}.attention.out.weight"]
        gate_up = ours[f"{block}.feed_forward.gate_up.weight"].view(-1, 2, GROUP, 64)
        state[f"{to}.mlp.gate_proj.weight"] = gate_up[:, 0].reshape(-1, 64)
        state[f"{to}.mlp.up_proj.weight"] = gate_up[:, 1].reshape(-1, 64)
        state[f"{to}.mlp.down_proj.weight"] = ours[f"{block}.feed_forward.down.weight"]
        state[f"{to}.input_layernorm.weight"] = ours[f"{block}.attention_norm.weight"]
        state[f"{to}.post_attention_layernorm.weight"] = ours[f"{block}.feed_forward_norm.weight"]
    return state
