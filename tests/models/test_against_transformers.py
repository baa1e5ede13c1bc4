"""Our decoder against the Llama of `transformers`, from the same weights: one implementation nobody here wrote."""

import pytest
import torch

from tests.models.shapes import TINY, TINY_HUGGINGFACE, real_model
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.ops.swiglu import GROUP

transformers = pytest.importorskip("transformers")

LLAMA3_1 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(("rope", "tied"), [(TINY.rope, False), (LLAMA3_1, False), (TINY.rope, True)])
def test_logits_equal(rope, tied):
    ours = real_model(rope=rope, tied_embeddings=tied, seq_len=128)
    theirs = llama(rope, tied).eval()
    theirs.load_state_dict(renamed(ours, tied))
    ids = torch.randint(0, 97, (2, 128))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-6, rtol=1e-5)


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


def renamed(model: torch.nn.Module, tied: bool) -> dict[str, torch.Tensor]:
    ours = dict(model.state_dict())
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
