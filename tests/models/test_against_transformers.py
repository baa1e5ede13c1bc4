"""Our decoder against the Llama of `transformers`, from the same weights: one implementation nobody here wrote."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.models.shapes import TINY, TINY_HUGGINGFACE, real_model
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.ops.swiglu import GROUP

transformers = pytest.importorskip("transformers")

LLAMA3_1 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.proves("llama", "logits", "gradients")
@pytest.mark.parametrize(("rope", "tied"), [(TINY.rope, False), (LLAMA3_1, False), (TINY.rope, True)])
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
    parameters = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling == "llama3":
        parameters = {
            "rope_type": "llama3",
            "rope_theta": rope.theta,
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **TINY_HUGGINGFACE,
            head_dim=16,
            rms_norm_eps=1e-5,
            rope_parameters=parameters,
            tie_word_embeddings=tied,
        )
    )


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
