"""Llama 4, text (Meta 2025): chunked attention, every fourth layer without RoPE, experts whose inputs are weighted.

Layers without RoPE have full attention and a query temperature; the others may have a norm without weight after RoPE.
The router takes one expert by its logit, and its sigmoid is the weight; one expert is shared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.types import NonNegativeFloat, PositiveInt
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
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec, QueryTemperature
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig, MoEVariant
from titan_exp.models.spec.moe_layer import moe_violations
from titan_exp.models.spec.rope import RopeConfig, rope_violations
from titan_exp.models.spec.transformer import (
    AttentionVariant,
    TransformerConfig,
    moe_transformer_layer,
    shape_violations,
    transformer_layer,
    transformer_spec,
)

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a Llama 4; `ffn_dim` is that of dense layers."""

    rope: RopeConfig
    """Rotary position embedding of layers with chunks. E.g. `model.rope.theta=1e6`."""
    chunk: PositiveInt
    """Length of the chunks of layers with RoPE, in positions. E.g. `model=llama4_debug model.chunk=64`."""
    nope_every: PositiveInt
    """Every so many layers, the last one has no RoPE and full attention.
    E.g. `model=llama4_debug model.nope_every=2`."""
    rotated_norm: bool
    """Normalize query and key heads after RoPE, without weight. E.g. `model=llama4_debug model.rotated_norm=false`."""
    temperature: NonNegativeFloat
    """Coefficient c of the query temperature of layers without RoPE, 1 + c · ln(1 + floor((position + 1) /
    temperature_floor)); 0 is none. E.g. `model=llama4_debug model.temperature=0`."""
    temperature_floor: PositiveInt
    """Positions of one factor of the query temperature. E.g. `model=llama4_debug model.temperature_floor=64`."""
    moe_every: PositiveInt
    """Every so many layers, the last one has experts; the others are dense.
    E.g. `model=llama4_debug model.moe_every=1`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Layers with chunks or without RoPE, dense or with experts."""
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


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with the layer's attention, dense or with experts."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a Llama 4."""
    yield from shape_violations(config)
    yield from rope_violations(config.rope)
    yield from moe_violations(config.moe)


NAMES = replace(
    HUGGINGFACE,
    interleaved=True,
    gate="model.layers.{}.feed_forward.gate_proj.weight",
    up="model.layers.{}.feed_forward.up_proj.weight",
    down="model.layers.{}.feed_forward.down_proj.weight",
    router="model.layers.{}.feed_forward.router.weight",
    experts_gate_up="model.layers.{}.feed_forward.experts.gate_up_proj",
    expert_down="model.layers.{}.feed_forward.experts.down_proj",
    shared_gate="model.layers.{}.feed_forward.shared_expert.gate_proj.weight",
    shared_up="model.layers.{}.feed_forward.shared_expert.up_proj.weight",
    shared_down="model.layers.{}.feed_forward.shared_expert.down_proj.weight",
)
"""Names of `transformers`, which rotates neighbours as Meta does."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from Hugging Face's tensors to our parameters."""
    return decoder_map(spec(config), {"huggingface": NAMES}[form])


def _rope_layers(layers: int, nope_every: int) -> list[int]:
    return [int((layer + 1) % nope_every != 0) for layer in range(layers)]


def _moe_layers(layers: int, moe_every: int) -> list[int]:
    return list(range(moe_every - 1, layers, moe_every))


def _to_config_json(config: Config) -> dict[str, Any]:
    moe = config.moe
    extra = {
        "intermediate_size": moe.ffn_dim,
        "intermediate_size_mlp": config.ffn_dim,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.active_experts,
        "router_aux_loss_coef": moe.balance.coefficient,
        "interleave_moe_layer_step": config.moe_every,
        "moe_layers": _moe_layers(config.layers, config.moe_every),
        "no_rope_layer_interval": config.nope_every,
        "no_rope_layers": _rope_layers(config.layers, config.nope_every),
        "attention_chunk_size": config.chunk,
        "use_qk_norm": config.rotated_norm,
        "attn_temperature_tuning": config.temperature > 0,
        "attn_scale": config.temperature,
        "floor_scale": config.temperature_floor,
        **_FIXED,
    }
    return common_keys(config, extra=extra)


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    layers, context = int(values["num_hidden_layers"]), int(values["max_position_embeddings"])
    nope_every = int(values.get("no_rope_layer_interval", 4))
    moe_every = int(values.get("interleave_moe_layer_step", 1))
    for key, wanted in (
        ("no_rope_layers", _rope_layers(layers, nope_every)),
        ("moe_layers", _moe_layers(layers, moe_every)),
    ):
        if (values.get(key) or wanted) != wanted:
            raise UserError(
                f"config.json: {key}={values[key]!r}, but a llama4_text here has one such layer in every few."
            )
    return Config(
        name=name,
        architecture="llama4",
        context=context,
        rope=read_rope(values, context, RopeConfig),
        ffn_dim=int(values.get("intermediate_size_mlp", 16384)),
        chunk=int(values.get("attention_chunk_size", 8192)),
        nope_every=nope_every,
        rotated_norm=bool(values.get("use_qk_norm", True)),
        temperature=float(values.get("attn_scale", 0.1)) if values.get("attn_temperature_tuning", True) else 0.0,
        temperature_floor=int(values.get("floor_scale", 8192)),
        moe_every=moe_every,
        moe=MoEConfig(
            experts=routed_experts(values, "num_local_experts"),
            active_experts=int(values["num_experts_per_tok"]),
            ffn_dim=int(values["intermediate_size"]),
            balance=BalanceConfig("none", 0.0, 0.0, 0.0, centered_bias=True),
            fp32_router=False,
            **_ROUTING,
        ),
        **common_fields(values),
    )


_ROUTING: dict[str, Any] = {**PLAIN_ROUTER, "score": "sigmoid", "normalized": False, "shared_experts": 1}
"""Fields of `MoEConfig` that `config.json` has no keys for."""

_FIXED = {"attention_bias": False, "hidden_act": "silu"}

huggingface = HuggingFace(
    model_type="llama4_text",
    architectures=("Llama4ForCausalLM",),
    fixed=_FIXED,
    to_config=_to_config_json,
    from_config=_from_config_json,
    violations=lambda config: router_violations(config.moe, _ROUTING, "Llama 4"),
    multimodal_type="llama4",
    multimodal_prefix="language_model.",
)
"""`config.json` of the text model in Hugging Face's Llama 4."""
