"""Llama whose residual outputs start as large as its other weights."""

from dataclasses import dataclass

from titan_exp.models import family
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.models.spec.transformer import TransformerConfig, transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a flat Llama."""

    rope: RopeConfig
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind."""
    return transformer_spec(config, (transformer_layer(config, out_std=config.init_std),) * config.layers)


block, violations = family.block, family.violations
