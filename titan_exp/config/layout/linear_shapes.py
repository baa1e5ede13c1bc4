"""The projections of the built-in model by name and shape, and which of them a recipe quantizes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.quantization import QuantizationConfig


@dataclass(frozen=True)
class Projection:
    """A weight of a block."""

    name: str
    """Name of the module."""
    inputs: int
    """Columns of the whole weight."""
    outputs: int
    """Rows of the whole weight."""
    divided: Literal["inputs", "outputs"]
    """Which of them tensor parallelism divides."""


def projections(model: ModelConfig) -> Iterator[Projection]:
    """Every projection of the built-in model."""
    heads, dim = model.heads * model.head_dim, model.dim
    for layer in range(model.layers):
        block = f"blocks.{layer}"
        yield Projection(f"{block}.attention.qkv", dim, heads + 2 * model.kv_heads * model.head_dim, "outputs")
        yield Projection(f"{block}.attention.out", heads, dim, "inputs")
        yield Projection(f"{block}.feed_forward.gate_up", dim, 2 * model.ffn_dim, "outputs")
        yield Projection(f"{block}.feed_forward.down", model.ffn_dim, dim, "inputs")


def is_quantized(config: QuantizationConfig, layers: int, name: str, inputs: int, outputs: int) -> bool:
    """Whether the recipe takes a projection.

    Args:
        config: recipe and choice, `smallest_gemm` resolved.
        layers: blocks of the whole model.
        name: the projection's name in the whole model.
        inputs: columns of its whole weight.
        outputs: rows of its whole weight.
    """
    assert config.smallest_gemm is not None, "the recipe is not resolved"
    numbered = re.match(r"blocks\.(\d+)\.", name)
    layer = int(numbered[1]) if numbered else None
    return (
        config.recipe != "none"
        and min(inputs, outputs) >= config.smallest_gemm
        and (layer is None or config.high_precision_first <= layer < layers - config.high_precision_last)
        and not any(fnmatchcase(name, pattern) for pattern in config.filter)
    )
