"""Llama whose attention takes a norm over each query and key head, or a sliding window."""

from dataclasses import dataclass

from titan_exp.models import family, llama
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import AttentionVariant, transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(llama.Config):
    """Keys of a Llama, and two of its own."""

    qk_norm: bool = False
    """True for a norm over each query and key head."""
    window: int | None = None
    """Sliding window in tokens; null is none."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind."""
    attention = AttentionVariant(window=config.window, qk_norm="head" if config.qk_norm else None)
    layer = transformer_layer(config, out_std=config.init_std / (2 * config.layers) ** 0.5, attention=attention)
    return transformer_spec(config, (layer,) * config.layers)


block, violations = family.block, family.violations
