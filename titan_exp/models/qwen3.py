"""Qwen3, dense (Yang et al. 2025): grouped-query attention with QK norm per head before RoPE, SwiGLU.

A head's width is independent of dim / heads, and all weights start with one standard deviation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import Violation
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.hf_config import HuggingFace, common_fields, common_keys
from titan_exp.models.convert.rope_keys import read_rope
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import ScaledRope, rope_violations
from titan_exp.models.spec.transformer import (
    NORMED,
    TransformerConfig,
    shape_violations,
    transformer_layer,
    transformer_spec,
)

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a dense Qwen3."""

    rope: ScaledRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind, each with a norm over query and key heads."""
    layer = transformer_layer(config, out_std=config.init_std, attention=NORMED)
    return transformer_spec(config, (layer,) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with QK norm."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a Qwen3."""
    yield from shape_violations(config)
    yield from rope_violations(config.rope)


STATE_DICTS = {"huggingface": HUGGINGFACE}
"""Parameter names by checkpoint format."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return decoder_map(spec(config), STATE_DICTS[form])


def _to_config_json(config: Config) -> dict[str, Any]:
    extra = {"intermediate_size": config.ffn_dim, "attention_bias": False, "use_sliding_window": False}
    return common_keys(config, extra=extra)


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    context = int(values["max_position_embeddings"])
    return Config(
        name=name,
        architecture="qwen3",
        context=context,
        rope=read_rope(values, context, ScaledRope),
        ffn_dim=int(values["intermediate_size"]),
        **common_fields(values),
    )


huggingface = HuggingFace(
    model_type="qwen3",
    architectures=("Qwen3ForCausalLM",),
    fixed={"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"},
    to_config=_to_config_json,
    from_config=_from_config_json,
)
"""`config.json` of Hugging Face's Qwen3."""
