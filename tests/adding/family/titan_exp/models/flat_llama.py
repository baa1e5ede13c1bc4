"""Llama whose residual outputs start as large as its other weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.models.llama import violations
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.models.spec.transformer import TransformerConfig, transformer_layer, transformer_spec

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend

__all__ = ["Config", "block", "spec", "violations"]


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a flat Llama."""

    rope: RopeConfig
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind."""
    return transformer_spec(config, (transformer_layer(config, out_std=config.init_std),) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with grouped-query attention and SwiGLU."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)
