"""Kimi Linear (Kimi Team 2025): Kimi Delta Attention in three of four layers, latent attention in the fourth, experts.

Latent attention knows no positions, although all heads share a part of the key as in DeepSeek. The router scores by
sigmoids with a bias for the choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_exp.config.errors.user_error import Violation, shown
from titan_exp.models import deepseek, family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, LinearAttentionNames, swiglu_names
from titan_exp.models.convert.hf_keys import UNBALANCED, Key, flag, huggingface_class, whole
from titan_exp.models.qwen3_next import interval
from titan_exp.models.spec.linear_attention import (
    LINEAR_ATTENTION,
    LinearAttentionFields,
    hybrid_layers,
    with_linear_attention,
)
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import OptionalRope
from titan_exp.models.spec.transformer import decoder_spec


@dataclass(frozen=True)
class Config(LinearAttentionFields, deepseek.LatentMoEConfig):
    """Shape of a Kimi Linear."""

    rope: OptionalRope
    """Rotary position embedding of layers with latent attention."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers with linear and with latent attention, dense layers first, then layers with experts."""
    dense, mixed = deepseek.layer_kinds(config)
    mixer = replace(
        config.gated_delta_net(config.norm_eps), decay="channel", gate="sigmoid", rates=(1.0, 16.0), steps=(1e-3, 0.1)
    )
    full = [dense] * config.dense_layers + [mixed] * (config.layers - config.dense_layers)
    linear = {layer: with_linear_attention(layer, mixer, config.dim, config.init_std) for layer in (dense, mixed)}
    return decoder_spec(
        config,
        hybrid_layers(config.linear_attention, full, [linear[layer] for layer in full]),
        rope=config.rope,
        rope_dim=config.qk_rope_head_dim,
    )


_QKV = ("query", "key", "value")
STATE_DICTS = {
    "huggingface": HUGGINGFACE.but(
        {
            "feed_forward.router.weight": "block_sparse_moe.gate.weight",
            "feed_forward.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
            **swiglu_names("feed_forward.experts", "block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
            **swiglu_names("feed_forward.shared", "block_sparse_moe.shared_experts"),
        },
        linear_attention=LinearAttentionNames(
            projections={
                **{f"self_attn.{part[0]}_proj.weight": (part,) for part in (*_QKV, "beta")},
                "self_attn.f_b_proj.weight": ("decay",),
                "self_attn.g_b_proj.weight": ("gate",),
            },
            convolutions={f"self_attn.{part[0]}_conv1d.weight": (part,) for part in _QKV},
            parts={
                "attention.forget.log_rate": "self_attn.A_log",
                "attention.forget.bias": "self_attn.dt_bias",
                "attention.out_norm": "self_attn.o_norm.weight",
                "attention.decay_a": "self_attn.f_a_proj.weight",
                "attention.gate_a": "self_attn.g_a_proj.weight",
            },
            log_rate_dims=4,
        ),
        # transformers writes dense layers under the name of layers with experts.
        aliases={f"mlp.{part}_proj.weight": f"block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down")},
    )
}
"""Names of the published files, and of those that `transformers` writes."""
block, violations = family.block, deepseek.violations
state_dict_map = family.decoder_maps(STATE_DICTS)


def _mixer(fields: str, flat: str, nested: str, default: int) -> Key:
    """Key of linear attention, which the published file nests and transformers does not."""

    def read(values: Mapping[str, Any], _: object) -> int:
        return whole((values.get("linear_attn_config") or {}).get(nested, values.get(flat, default)))

    return Key(" ".join(f"linear_attention.{field}" for field in fields.split()), read=read)


def _interval(values: Mapping[str, Any], _: object) -> int:
    numbers = (values.get("linear_attn_config") or {}).get("full_attn_layers")
    return min(numbers) if numbers else interval(values)


def _nested(config: Config) -> dict[str, Any]:
    shape, kinds = config.linear_attention, config.linear_attention.kinds(config.layers)
    numbered = [(number + 1, kind == "full_attention") for number, kind in enumerate(kinds)]
    return {
        "full_attn_layers": [number for number, full in numbered if full],
        "kda_layers": [number for number, full in numbered if not full],
        "num_heads": shape.key_heads,
        "head_dim": shape.key_dim,
        "short_conv_kernel_size": shape.taps,
    }


def _dense_layers(values: Mapping[str, Any], _: object) -> int:
    kinds = values.get("mlp_layer_types")
    return kinds.count("dense") if kinds else whole(values.get("first_k_dense_replace", 1))


_KEYS: dict[str, Any] = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("dim"),
    "num_hidden_layers": Key("layers"),
    "num_attention_heads": Key("heads"),
    "num_key_value_heads": Key(write=lambda config: config.heads),
    "q_lora_rank": Key("q_lora_rank", lambda rank: None if rank is None else whole(rank), None),
    "kv_lora_rank": Key("kv_lora_rank"),
    "qk_nope_head_dim": Key("qk_nope_head_dim"),
    "qk_rope_head_dim": Key("qk_rope_head_dim"),
    "v_head_dim": Key("v_head_dim"),
    "mla_use_nope": True,
    "first_k_dense_replace": Key("dense_layers", read=_dense_layers),
    "intermediate_size": Key("ffn_dim"),
    "model_max_length": Key("context", default=1048576),
    "rms_norm_eps": Key("norm_eps", float, 1e-5),
    "num_experts": Key("moe.experts"),
    "num_experts_per_token": Key("moe.active_experts"),
    "moe_intermediate_size": Key("moe.ffn_dim"),
    "num_shared_experts": Key("moe.shared_experts"),
    "moe_renormalize": Key("moe.normalized", flag, True),
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": Key("moe.scale", float),
    "num_expert_group": Key("moe.groups", default=1),
    "topk_group": Key("moe.active_groups", default=1),
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "linear_num_heads": _mixer("key_heads value_heads", "linear_num_heads", "num_heads", 32),
    "linear_head_dim": _mixer("key_dim value_dim", "linear_head_dim", "head_dim", 128),
    "linear_conv_kernel_dim": _mixer("taps", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    "layer_types": Key(
        "linear_attention.full_every",
        read=_interval,
        write=lambda config: config.linear_attention.kinds(config.layers),
        refusal="layer_types={value!r}, but our kimi_linear has full_attention at a fixed interval and in the last "
        "layer.",
    ),
    "linear_attn_config": Key(
        write=_nested, refusal="linear_attn_config={value!r}, which our kimi_linear cannot have."
    ),
    "tie_word_embeddings": Key("tied_embeddings", flag, False),
    "hidden_act": "silu",
    # The class would take the id of its released tokenizer, and give that row of the embedding no gradient.
    "pad_token_id": Key(write=lambda _: None),
    "initializer_range": Key("init_std", float, 0.02),
}


def _inexpressible(config: Config) -> Iterator[Violation]:
    """Violations by heads and routers that transformers' class does not have."""
    shape = config.linear_attention
    for key, value, other in (
        ("value_heads", shape.value_heads, shape.key_heads),
        ("value_dim", shape.value_dim, shape.key_dim),
    ):
        if value != other:
            field, reason = f"{LINEAR_ATTENTION}.{key}", "transformers has one number for queries, keys and values"
            yield Violation(field, value, reason, f"use {field}={other}")
    if config.rope.rotates:
        reason = "transformers has no rotary embedding in this family"
        yield Violation("model.rope.theta", config.rope.theta, reason, "use model.rope.theta=null")
    for key, value in (("router_bias", True), ("group_score", "top2_sum"), ("score", "sigmoid")):
        if (own := getattr(config.moe, key)) != value:
            field = f"model.moe.{key}"
            yield Violation(field, own, "transformers has another router in this family", f"use {field}={shown(value)}")


huggingface = huggingface_class(
    "kimi_linear",
    "KimiLinearForCausalLM",
    Config,
    _KEYS,
    {
        "moe.fp32_router": True,
        "moe.balance": UNBALANCED,
        "moe.router_bias": True,
        "moe.group_score": "top2_sum",
        "moe.score": "sigmoid",
        "rope.theta": None,
    },
    violations=_inexpressible,
)
