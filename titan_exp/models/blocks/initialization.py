"""Weight initialization as a pure function of (seed, full parameter name, index), in any layout.

A matrix is drawn in blocks of `BLOCK_ROWS` rows, each from its own counter-based generator, so that a rank draws only
the blocks that its shard touches: no communication, no full tensor, the same bits in every layout.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

BLOCK_ROWS = 64
"""Rows drawn by one generator."""

TRUNCATION = 3.0
"""Truncation in standard deviations: values beyond are drawn again."""


@dataclass(frozen=True)
class InitSpec:
    """Initial distribution of a parameter."""

    kind: Literal["normal", "ones", "zeros"]
    """Distribution."""
    std: float = 0.0
    """Standard deviation of `normal`."""


@dataclass(frozen=True)
class ShardSpec:
    """Rectangular shard of a parameter."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: tuple[int, ...]
    """First index of the shard in each dim."""
    size: tuple[int, ...]
    """Extent of the shard in each dim; zero if this rank holds nothing."""

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "ShardSpec":
        """The whole parameter as one shard."""
        return ShardSpec(shape, (0,) * len(shape), shape)


def init_slice(seed: int, name: str, init: InitSpec, part: ShardSpec) -> Tensor:
    """Initial values of a shard of the parameter with this full name, fp32 on the CPU."""
    shape, start, size = part.shape, part.start, part.size
    if init.kind != "normal":
        return torch.full(size, 1.0 if init.kind == "ones" else 0.0)
    if 0 in size:
        return torch.empty(size)
    if len(shape) == 1:
        return init_slice(seed, name, init, ShardSpec((1, *shape), (0, *start), (1, *size)))[0]
    if len(shape) > 2:
        # Stacked matrices (experts): each is drawn like a parameter of its own.
        parts = (
            init_slice(seed, f"{name}[{index}]", init, ShardSpec(shape[1:], start[1:], size[1:]))
            for index in range(start[0], start[0] + size[0])
        )
        return torch.stack(list(parts))
    return torch.from_numpy(_matrix_slice(seed, name, init.std, part))


def _matrix_slice(seed: int, name: str, std: float, part: ShardSpec) -> np.ndarray:
    shape, start, size = part.shape, part.start, part.size
    values = np.empty(size, dtype=np.float32)
    end = start[0] + size[0]
    columns = slice(start[1], start[1] + size[1])
    for block in range(start[0] // BLOCK_ROWS, -(-end // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        # Whole blocks, also at the matrix's end, so that a draw never depends on where a shard was cut.
        draw = _truncated_normal(_generator(seed, name, block), (BLOCK_ROWS, shape[1]))
        low, high = max(first, start[0]), min(first + BLOCK_ROWS, end)
        values[low - start[0] : high - start[0]] = draw[low - first : high - first, columns]
    values *= np.float32(std)
    return values


def _truncated_normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    draw = generator.standard_normal(shape, dtype=np.float32)
    while (beyond := np.abs(draw) > TRUNCATION).any():
        draw[beyond] = generator.standard_normal(np.count_nonzero(beyond), dtype=np.float32)
    return draw


def _generator(seed: int, name: str, block: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
