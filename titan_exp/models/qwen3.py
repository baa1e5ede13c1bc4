"""Qwen3, dense (Yang et al. 2025): grouped-query attention with QK norm per head before RoPE, SwiGLU.

A head's width is independent of dim / heads, and all weights start with one standard deviation.
"""

from dataclasses import dataclass

from titan_exp.models import family
from titan_exp.models.convert.hf_keys import Key, attention_keys, huggingface_class, rope_keys
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import ScaledRope
from titan_exp.models.spec.transformer import NORMED, TransformerConfig, transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a dense Qwen3."""

    rope: ScaledRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers of one kind, each with a norm over query and key heads."""
    layer = transformer_layer(config, out_std=config.init_std, attention=NORMED)
    return transformer_spec(config, (layer,) * config.layers)


block, violations = family.block, family.violations
state_dict_map = family.decoder_maps()

huggingface = huggingface_class(
    "qwen3",
    "Qwen3ForCausalLM",
    Config,
    attention_keys(
        rope_keys(ScaledRope),
        {"intermediate_size": Key("ffn_dim"), "attention_bias": False, "use_sliding_window": False},
    ),
)
