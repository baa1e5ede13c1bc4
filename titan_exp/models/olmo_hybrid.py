"""OLMo Hybrid (Team OLMo 2026): Gated DeltaNet in three of four layers, the attention of OLMo 2 in the fourth.

Norms come before the branches of layers with linear attention, and after those of layers with softmax attention.
Released models have no RoPE. The write strength reaches 2, so that a state's transition may have negative eigenvalues.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_exp.models import family, olmo2
from titan_exp.models.convert.decoder_state_dict import LinearAttentionNames
from titan_exp.models.convert.hf_keys import Key, attention_keys, huggingface_class
from titan_exp.models.qwen3_next import mixer_keys
from titan_exp.models.spec import transformer
from titan_exp.models.spec.linear_attention import LinearAttentionFields, hybrid_layers, with_linear_attention
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import OptionalRope

OUT_NORM_EPS = 1e-5  # epsilon of the norm over the outputs of linear attention, independent of the other norms


@dataclass(frozen=True)
class Config(LinearAttentionFields, transformer.TransformerConfig):
    """Shape of an OLMo Hybrid."""

    rope: OptionalRope
    """Rotary position embedding of layers with softmax attention."""


def spec(config: Config) -> ModelSpec:
    """Spec: pre-norm layers with linear attention, and layers with softmax attention whose norms come after."""
    attention = transformer.AttentionVariant(qk_norm="all_heads", rope=config.rope.rotates)
    layer = transformer.transformer_layer(config, out_std=config.init_std, attention=attention)
    mixer = replace(config.gated_delta_net(OUT_NORM_EPS), strongest_write=2.0, rates=(0.0, 16.0), steps=(1e-3, 0.1))
    linear = with_linear_attention(layer, mixer, config.dim, config.init_std)
    return transformer.decoder_spec(
        config,
        hybrid_layers(
            config.linear_attention, [transformer.post_normed(layer)] * config.layers, [linear] * config.layers
        ),
        rope=config.rope,
        rope_dim=config.head_dim,
    )


_QKV = ("query", "key", "value")
STATE_DICTS = {
    "huggingface": replace(
        olmo2.STATE_DICTS["huggingface"],
        linear_attention=LinearAttentionNames(
            projections={
                **{f"linear_attn.{part[0]}_proj.weight": (part,) for part in (*_QKV, "gate", "beta")},
                "linear_attn.a_proj.weight": ("decay",),
            },
            convolutions={f"linear_attn.{part[0]}_conv1d.weight": (part,) for part in _QKV},
            parts={
                "attention_norm": "attention_layer_norm.weight",
                "feed_forward_norm": "feedforward_layer_norm.weight",
                "attention.forget.log_rate": "linear_attn.A_log",
                "attention.forget.bias": "linear_attn.dt_bias",
                "attention.out_norm": "linear_attn.o_norm.weight",
                "attention.out": "linear_attn.o_proj.weight",
            },
        ),
        # transformers renames on reading, and writes the norm behind attention under the name of another layer's norm.
        aliases={"post_attention_layernorm.weight": "feedforward_layer_norm.weight"},
    )
}
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)


def _theta(values: Mapping[str, Any]) -> float | None:
    """Base of RoPE; only rope_parameters that name a null theta mean no RoPE."""
    nested = values.get("rope_parameters") or {}
    theta = nested["rope_theta"] if "rope_theta" in nested else values.get("rope_theta", 10000.0)
    return None if theta is None else float(theta)


_ROPE = {
    "max_position_embeddings": Key("context", default=65536),
    "rope_parameters": Key(
        "rope.theta",
        read=lambda values, _: _theta(values),
        write=lambda config: {"rope_theta": config.rope.theta, "rope_type": "default"},
        refusal="rope_parameters={value!r}, but our olmo_hybrid has no scaling of RoPE.",
    ),
}
_KEYS = {
    "intermediate_size": Key("ffn_dim"),
    **mixer_keys("olmo_hybrid"),
    "linear_key_head_dim": Key(
        "linear_attention.key_dim",
        default=lambda fields: int(0.75 * fields["dim"] / fields["linear_attention.key_heads"]),
    ),
    "linear_value_head_dim": Key(
        "linear_attention.value_dim", default=lambda fields: 2 * fields["linear_attention.key_dim"]
    ),
    "linear_allow_neg_eigval": True,
    "attention_bias": False,
    # The class would take the ids of its released tokenizer, and give a row of the embedding no gradient.
    "pad_token_id": Key(write=lambda _: None),
    "eos_token_id": Key(write=lambda _: None),
}
_HEADS = {
    name: Key(f"linear_attention.{field}", default=lambda fields: fields["heads"])
    for name, field in (("linear_num_key_heads", "key_heads"), ("linear_num_value_heads", "value_heads"))
}

huggingface = huggingface_class(
    "olmo_hybrid", "OlmoHybridForCausalLM", Config, attention_keys(_ROPE, {**_HEADS, **_KEYS, **_HEADS})
)
