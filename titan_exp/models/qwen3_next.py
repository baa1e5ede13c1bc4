"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet in three of four layers, gated softmax attention in the fourth, experts.

Norms multiply by one plus their weight, RoPE rotates the first features of a head, and a sigmoid gates the shared
expert. Modules of multi-token prediction in published files are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.config.groups.types import PositiveInt
from titan_exp.models import family
from titan_exp.models.convert import hf_keys
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, LinearAttentionNames, swiglu_names
from titan_exp.models.spec.linear_attention import LinearAttentionFields, hybrid_layers, with_linear_attention
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.moe import MoEConfig, MoEVariant
from titan_exp.models.spec.rope import ScaledRope
from titan_exp.models.spec.transformer import AttentionConfig, AttentionVariant, decoder_spec, moe_transformer_layer


@dataclass(frozen=True)
class HybridConfig(LinearAttentionFields, AttentionConfig):
    """Fields of a Qwen with linear attention."""

    rope: ScaledRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    rotary_dim: PositiveInt
    """Number of first features of a query or key head that RoPE rotates.
    E.g. `model=qwen3_next_debug model.rotary_dim=16`."""

    @property
    def variant(self) -> AttentionVariant:
        """Softmax attention with gates, QK norm and partial RoPE."""
        return AttentionVariant(qk_norm="head", rotary_dim=self.rotary_dim, gated=True, zero_centered=True)


@dataclass(frozen=True)
class Config(HybridConfig):
    """Shape of a Qwen3-Next."""

    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Any) -> ModelSpec:
    """Spec: layers with linear and with softmax attention, and experts in each."""
    experts = MoEVariant(gated_shared=True)
    std = config.init_std
    layer = moe_transformer_layer(config, config.moe, out_std=std, attention=config.variant, experts=experts)
    return hybrid_spec(config, layer)


def hybrid_spec(config: HybridConfig, full: LayerSpec) -> ModelSpec:
    """Spec of a Qwen whose layers with softmax attention are like this one."""
    mixer = config.gated_delta_net(config.norm_eps)
    linear = with_linear_attention(full, mixer, config.dim, config.init_std)
    return decoder_spec(
        config,
        hybrid_layers(config.linear_attention, [full] * config.layers, [linear] * config.layers),
        rope=config.rope.resolved(config.context),
        rope_dim=config.rotary_dim,
        zero_centered_norm=True,
    )


MIXER_NAMES = LinearAttentionNames(
    projections={
        "linear_attn.in_proj_qkvz.weight": ("query", "key", "value", "gate"),
        "linear_attn.in_proj_ba.weight": ("beta", "decay"),
    },
    by_head=True,
    convolutions={"linear_attn.conv1d.weight": ("query", "key", "value")},
    parts={
        "attention.forget.log_rate": "linear_attn.A_log",
        "attention.forget.bias": "linear_attn.dt_bias",
        "attention.out_norm": "linear_attn.norm.weight",
        "attention.out": "linear_attn.out_proj.weight",
    },
)
"""Names of Gated DeltaNet, whose projections are fused by key head."""
NAMES = HUGGINGFACE.but(
    {
        **swiglu_names("feed_forward.shared", "mlp.shared_expert"),
        "feed_forward.shared_gate": "mlp.shared_expert_gate.weight",
    },
    linear_attention=MIXER_NAMES,
)
STATE_DICTS = {"huggingface": NAMES}
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)


def rotated_share(values: Mapping[str, Any]) -> float:
    """Share of a head's features that RoPE rotates, from `config.json`, which has it in one of two places."""
    nested = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return float(nested.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 0.25)


def interval(values: Mapping[str, Any], default: int = 4) -> int:
    """Interval of layers with softmax attention, from `config.json`."""
    kinds = values.get("layer_types") or []
    found = kinds.index("full_attention") + 1 if "full_attention" in kinds else default
    return hf_keys.whole(values.get("full_attention_interval") or found)


def mixer_keys(name: str) -> hf_keys.Keys:
    """Keys of linear attention for a model_type of this name, in the group `linear_attention`."""
    return {
        "linear_conv_kernel_dim": hf_keys.Key("linear_attention.taps", default=4),
        "linear_key_head_dim": hf_keys.Key("linear_attention.key_dim", default=128),
        "linear_value_head_dim": hf_keys.Key("linear_attention.value_dim", default=128),
        "linear_num_key_heads": hf_keys.Key("linear_attention.key_heads", default=16),
        "linear_num_value_heads": hf_keys.Key("linear_attention.value_heads", default=32),
        "layer_types": hf_keys.Key(
            "linear_attention.full_every",
            read=lambda values, _: interval(values),
            write=lambda config: config.linear_attention.kinds(config.layers),
            refusal=f"layer_types={{value!r}}, but our {name} has full_attention at a fixed interval and in the last "
            "layer.",
        ),
    }


def hybrid_keys(name: str, keys: hf_keys.Keys) -> hf_keys.Keys:
    """Keys of a Qwen with linear attention for a model_type of this name, around `keys`."""
    rotary = hf_keys.Key(
        "rotary_dim",
        read=lambda values, fields: hf_keys.whole(fields["head_dim"] * rotated_share(values)),
        write=lambda config: config.rotary_dim / config.head_dim,
    )
    own = {
        "partial_rotary_factor": rotary,
        "full_attention_interval": hf_keys.Key(write=lambda config: config.linear_attention.full_every),
        **mixer_keys(name),
        "attention_bias": False,
    }
    return {
        **hf_keys.attention_keys(hf_keys.rope_keys(ScaledRope), own | dict(keys)),
        "head_dim": hf_keys.Key("head_dim", default=256),
    }


EXPERT_KEYS: hf_keys.Keys = {
    "moe_intermediate_size": hf_keys.Key("moe.ffn_dim"),
    "shared_expert_intermediate_size": hf_keys.Key(
        write=lambda config: config.moe.ffn_dim,
        refusal="shared_expert_intermediate_size={value!r}, but our shared expert is as wide as the others.",
    ),
    "num_experts": hf_keys.Key("moe.experts"),
    "num_experts_per_tok": hf_keys.Key("moe.active_experts"),
    "router_aux_loss_coef": hf_keys.Key("moe.balance.coefficient", float, 0.001),
}
"""Keys of experts, one of which is shared."""
EXPERT_FIELDS: Mapping[str, Any] = {
    "moe.fp32_router": False,
    **{f"moe.balance.{key}": value for key, value in hf_keys.GLOBAL_BALANCE.items()},
}
"""Fields of experts that have no keys in the file."""
UNREAD = ("mtp.",)  # prefixes of tensors that we do not read: modules of multi-token prediction

huggingface = hf_keys.huggingface_class(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    Config,
    hybrid_keys(
        "qwen3_next",
        {
            "intermediate_size": hf_keys.Key(write=lambda config: config.moe.ffn_dim * config.moe.active_experts),
            **EXPERT_KEYS,
            "norm_topk_prob": hf_keys.Key("moe.normalized", hf_keys.flag, True),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    EXPERT_FIELDS,
    router={**hf_keys.PLAIN_ROUTER, "shared_experts": 1},
    called="Qwen3-Next",
    unread=lambda values: UNREAD,
)
