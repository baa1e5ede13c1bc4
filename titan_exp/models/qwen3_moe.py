"""Qwen3 with experts (Yang et al. 2025): the attention of Qwen3, and experts in every layer.

The router chooses by a softmax over all experts and divides the chosen values by their sum. No expert is shared.
"""

from dataclasses import dataclass

from titan_exp.models import family
from titan_exp.models.convert import hf_keys
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.moe import MoEConfig
from titan_exp.models.spec.rope import ScaledRope
from titan_exp.models.spec.transformer import NORMED, AttentionConfig, moe_transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(AttentionConfig):
    """Shape of a Qwen3 with experts."""

    rope: ScaledRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers of one kind, each with a norm over query and key heads."""
    layer = moe_transformer_layer(config, config.moe, out_std=config.init_std, attention=NORMED)
    return transformer_spec(config, (layer,) * config.layers)


block, violations = family.block, family.violations
state_dict_map = family.decoder_maps()

_KEYS = {
    # Width of a dense layer; there is none.
    "intermediate_size": hf_keys.Key(write=lambda config: config.moe.ffn_dim * config.moe.active_experts),
    "moe_intermediate_size": hf_keys.Key("moe.ffn_dim"),
    "num_experts": hf_keys.Key(
        "moe.experts",
        # The former is the name in transformers 5.
        read=lambda values, _: hf_keys.whole(values.get("num_local_experts") or values["num_experts"]),
    ),
    "num_experts_per_tok": hf_keys.Key("moe.active_experts"),
    "norm_topk_prob": hf_keys.Key("moe.normalized", hf_keys.flag, False),
    "router_aux_loss_coef": hf_keys.Key("moe.balance.coefficient", float, 0.001),
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

huggingface = hf_keys.huggingface_class(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    Config,
    hf_keys.attention_keys(hf_keys.rope_keys(ScaledRope), _KEYS),
    {"moe.fp32_router": False} | {f"moe.balance.{name}": value for name, value in hf_keys.GLOBAL_BALANCE.items()},
    router=hf_keys.PLAIN_ROUTER,
    called="Qwen3 with experts",
)
