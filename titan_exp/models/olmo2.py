"""OLMo 2 (Team OLMo 2024): norms after attention and feed-forward, and over queries and keys of all heads before RoPE.

Residual branches read the stream as it is, and all weights start with one standard deviation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import Violation
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.hf_config import HuggingFace, common_fields, common_keys
from titan_exp.models.convert.rope_keys import read_rope
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import ScaledRope, rope_violations
from titan_exp.models.spec.transformer import (
    AttentionVariant,
    TransformerConfig,
    post_normed,
    shape_violations,
    transformer_layer,
    transformer_spec,
)

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of an OLMo 2."""

    rope: ScaledRope
    """Rotary position embedding."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind, with norms behind both branches."""
    attention = AttentionVariant(qk_norm="all_heads")
    layer = post_normed(transformer_layer(config, out_std=config.init_std, attention=attention))
    return transformer_spec(config, (layer,) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Post-norm block with QK norm over all heads."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of an OLMo 2."""
    yield from shape_violations(config)
    yield from rope_violations(config.rope)


NAMES = replace(
    HUGGINGFACE,
    attention_norm="model.layers.{}.post_attention_layernorm.weight",
    feed_forward_norm="model.layers.{}.post_feedforward_layernorm.weight",
)
"""Names of `transformers`."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from Hugging Face's tensors to our parameters."""
    return decoder_map(spec(config), {"huggingface": NAMES}[form])


def _to_config_json(config: Config) -> dict[str, Any]:
    # Else the class takes those of the first OLMo, and gives row 1 of the embedding no gradient.
    unknown = {"pad_token_id": None, "eos_token_id": None}
    return common_keys(config, extra={"intermediate_size": config.ffn_dim, "attention_bias": False, **unknown})


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    context = int(values["max_position_embeddings"])
    fields: dict[str, Any] = common_fields(values) | {"norm_eps": float(values.get("rms_norm_eps", 1e-5))}
    return Config(
        name=name,
        architecture="olmo2",
        context=context,
        rope=read_rope(values, context, ScaledRope),
        ffn_dim=int(values["intermediate_size"]),
        **fields,
    )


huggingface = HuggingFace(
    model_type="olmo2",
    architectures=("Olmo2ForCausalLM",),
    fixed={"attention_bias": False, "hidden_act": "silu"},
    to_config=_to_config_json,
    from_config=_from_config_json,
)
"""`config.json` of Hugging Face's OLMo 2."""
