"""Llama 4, text (Meta 2025): chunked attention, every fourth layer without RoPE, experts whose inputs are weighted.

Layers without RoPE have full attention and a query temperature; in the others, a norm without weight may follow RoPE.
The router takes one expert by its logit, and its sigmoid is the weight; one expert is shared.
"""

from dataclasses import dataclass

from titan_exp.config.groups.types import NonNegativeFloat, PositiveInt
from titan_exp.models import family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, swiglu_names
from titan_exp.models.convert.hf_keys import (
    PLAIN_ROUTER,
    UNBALANCED,
    Key,
    attention_keys,
    flag,
    huggingface_class,
    rope_keys,
)
from titan_exp.models.spec.mixers import QueryTemperature
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.moe import MoEConfig, MoEVariant
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.models.spec.transformer import (
    AttentionVariant,
    TransformerConfig,
    moe_transformer_layer,
    transformer_layer,
    transformer_spec,
)


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a Llama 4; `ffn_dim` is that of dense layers."""

    rope: RopeConfig
    """Rotary position embedding of layers with chunks. E.g. `model.rope.theta=1e6`."""
    chunk: PositiveInt
    """Chunk length, in positions, of layers with RoPE: a token attends only within its chunk.
    E.g. `model=llama4_debug model.chunk=64`."""
    nope_every: PositiveInt
    """Interval of layers without RoPE: of every so many layers, the last one has no RoPE and full attention.
    E.g. `model=llama4_debug model.nope_every=2`."""
    rotated_norm: bool
    """True if query and key heads are normalized after RoPE, without a weight.
    E.g. `model=llama4_debug model.rotated_norm=false`."""
    temperature: NonNegativeFloat
    """Coefficient c of the query temperature in layers without RoPE, 1 + c · ln(1 + floor((position + 1) /
    temperature_floor)). 0 is none. E.g. `model=llama4_debug model.temperature=0`."""
    temperature_floor: PositiveInt
    """Number of consecutive positions with the same query temperature.
    E.g. `model=llama4_debug model.temperature_floor=64`."""
    moe_every: PositiveInt
    """Interval of layers with experts: of every so many layers, the last one has experts and the others are dense.
    E.g. `model=llama4_debug model.moe_every=1`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers with chunks or without RoPE, dense or with experts."""
    return transformer_spec(config, tuple(_layer(config, layer) for layer in range(config.layers)))


def _layer(config: Config, layer: int) -> LayerSpec:
    std = config.init_std
    if (layer + 1) % config.nope_every == 0:
        temperature = QueryTemperature(config.temperature, config.temperature_floor) if config.temperature else None
        attention = AttentionVariant(rope=False, temperature=temperature)
    else:
        attention = AttentionVariant(
            chunk=config.chunk, rotated_norm_eps=config.norm_eps if config.rotated_norm else None
        )
    if (layer + 1) % config.moe_every:
        return transformer_layer(config, out_std=std, attention=attention)
    experts = MoEVariant(weighted_inputs=True)
    return moe_transformer_layer(config, config.moe, out_std=std, attention=attention, experts=experts)


STATE_DICTS = {
    "huggingface": HUGGINGFACE.but(
        {
            **swiglu_names("feed_forward", "feed_forward"),
            **swiglu_names("feed_forward.shared", "feed_forward.shared_expert"),
            "feed_forward.router.weight": "feed_forward.router.weight",
            "feed_forward.experts.gate_up": "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down": "feed_forward.experts.down_proj",
        },
        interleaved=True,
    )
}
"""Names of `transformers`, which rotates neighbours as Meta does."""
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)

_REFUSAL = "={value!r}, but our llama4_text has such a layer at a fixed interval."
_KEYS = {
    "intermediate_size": Key("moe.ffn_dim"),
    "intermediate_size_mlp": Key("ffn_dim", default=16384),
    "num_local_experts": Key("moe.experts"),
    "num_experts_per_tok": Key("moe.active_experts"),
    "router_aux_loss_coef": Key(write=lambda config: config.moe.balance.coefficient),
    "interleave_moe_layer_step": Key("moe_every", default=1),
    "moe_layers": Key(
        write=lambda config: list(range(config.moe_every - 1, config.layers, config.moe_every)),
        refusal=f"moe_layers{_REFUSAL}",
    ),
    "no_rope_layer_interval": Key("nope_every", default=4),
    "no_rope_layers": Key(
        write=lambda config: [int((layer + 1) % config.nope_every != 0) for layer in range(config.layers)],
        refusal=f"no_rope_layers{_REFUSAL}",
    ),
    "attention_chunk_size": Key("chunk", default=8192),
    "use_qk_norm": Key("rotated_norm", flag, True),
    "attn_temperature_tuning": Key(write=lambda config: config.temperature > 0),
    "attn_scale": Key(
        "temperature",
        read=lambda values, _: (
            float(values.get("attn_scale", 0.1)) if values.get("attn_temperature_tuning", True) else 0.0
        ),
    ),
    "floor_scale": Key("temperature_floor", default=8192),
    "attention_bias": False,
}

huggingface = huggingface_class(
    "llama4_text",
    "Llama4ForCausalLM",
    Config,
    attention_keys(rope_keys(RopeConfig), _KEYS),
    {"moe.fp32_router": False, "moe.balance": UNBALANCED},
    router={**PLAIN_ROUTER, "score": "sigmoid", "normalized": False, "shared_experts": 1},
    called="Llama 4",
    multimodal_type="llama4",
    multimodal_prefixes={"language_model.": ""},
)
