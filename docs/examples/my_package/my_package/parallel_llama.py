"""Llama with attention and feed-forward in parallel (Wang and Komatsuzaki 2021): x + attention(n(x)) + ffn(n(x)).

A family: its spec gives it every layout, recipe and the planner. The file imports no torch at its top.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.types import PositiveFloat
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import TransformerConfig, shape_violations, transformer_layer, transformer_spec

if TYPE_CHECKING:
    from torch import nn

    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Keys of the group `model` for this architecture: those of a transformer, and one of its own."""

    branch_scale: PositiveFloat
    """Factor of the two branches before they are added to the residual stream."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind. There is one norm per block, so the feed-forward's is left out."""
    layer = transformer_layer(config, out_std=config.init_std / (2 * config.layers) ** 0.5)
    layer = replace(layer, vectors=tuple(vector for vector in layer.vectors if vector.name != "feed_forward_norm"))
    return transformer_spec(config, (layer,) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "nn.Module":
    """Module of one layer; its parameters have the names and shapes of `spec(config).layers[layer]`."""
    from my_package.parallel_block import ParallelBlock

    return ParallelBlock(spec(config).layers[layer], config.norm_eps, backend, config.branch_scale)


def violations(config: Config) -> Iterator[Violation]:
    """Shapes that the blocks cannot compute."""
    yield from shape_violations(config)
