"""Qwen3 with experts (Yang et al. 2025): the attention of Qwen3, and experts in every layer.

The router chooses by a softmax over all experts, whose chosen values are divided by their sum; no expert is shared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import Violation
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.hf_config import (
    PLAIN_ROUTER,
    HuggingFace,
    common_fields,
    common_keys,
    routed_experts,
    router_violations,
)
from titan_exp.models.convert.rope_keys import read_rope
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.moe_layer import moe_violations
from titan_exp.models.spec.rope import ScaledRope, rope_violations
from titan_exp.models.spec.transformer import (
    NORMED,
    AttentionConfig,
    attention_violations,
    moe_transformer_layer,
    transformer_spec,
)

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(AttentionConfig):
    """Shape of a Qwen3 with experts."""

    rope: ScaledRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind, each with a norm over query and key heads."""
    layer = moe_transformer_layer(config, config.moe, out_std=config.init_std, attention=NORMED)
    return transformer_spec(config, (layer,) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with QK norm and experts."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a Qwen3 with experts."""
    yield from attention_violations(config)
    yield from rope_violations(config.rope)
    yield from moe_violations(config.moe)


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from Hugging Face's tensors to our parameters."""
    return decoder_map(spec(config), {"huggingface": HUGGINGFACE}[form])


def _to_config_json(config: Config) -> dict[str, Any]:
    moe = config.moe
    extra = {
        # Width of a dense layer, of which there is none.
        "intermediate_size": moe.ffn_dim * moe.active_experts,
        "moe_intermediate_size": moe.ffn_dim,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.active_experts,
        "norm_topk_prob": moe.normalized,
        "router_aux_loss_coef": moe.balance.coefficient,
        **_FIXED,
    }
    return common_keys(config, extra=extra)


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    context = int(values["max_position_embeddings"])
    return Config(
        name=name,
        architecture="qwen3_moe",
        context=context,
        rope=read_rope(values, context, ScaledRope),
        moe=MoEConfig(
            experts=routed_experts(values, "num_experts"),
            active_experts=int(values["num_experts_per_tok"]),
            ffn_dim=int(values["moe_intermediate_size"]),
            normalized=bool(values.get("norm_topk_prob", False)),
            balance=BalanceConfig("global_batch", float(values.get("router_aux_loss_coef", 0.001)), 0.0, 0.0, True),
            fp32_router=False,
            **PLAIN_ROUTER,
        ),
        **common_fields(values),
    )


_FIXED = {
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
}

huggingface = HuggingFace(
    model_type="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    fixed=_FIXED,
    to_config=_to_config_json,
    from_config=_from_config_json,
    violations=lambda config: router_violations(config.moe, PLAIN_ROUTER, "Qwen3 with experts"),
)
"""`config.json` of Hugging Face's Qwen3 with experts."""
