"""Weight initialization as a pure function of (seed, full parameter name, index), in any layout and on any device.

Numbers come from a counter-based generator, whose counter is an element's index in the whole parameter, so that a rank
draws exactly its own shard where it lies: no communication, no full tensor, the same bits everywhere.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_exp.ops.truncated_normal import GAMMA, splitmix64, truncated_normal, wrap

CPU_CHUNK = 2**14
"""Random words drawn at once on a CPU: few enough for its cache. Threads would wait for each other longer
than they compute."""

DEVICE_CHUNK = 2**21
"""Random words drawn at once on an accelerator: temporary tensors of about 100 MB."""


@dataclass(frozen=True)
class InitSpec:
    """Initial distribution of a parameter."""

    kind: Literal["normal", "ones", "zeros"]
    """Distribution; `normal` is truncated at three standard deviations."""
    std: float = 0.0
    """Standard deviation of `normal`, before truncation."""
    scale: float = 1.0
    """Factor of the values."""


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


@torch.no_grad()
def init_shard_(values: Tensor, seed: int, name: str, init: InitSpec, part: ShardSpec) -> None:
    """Fill `values`, a shard of the parameter with this full name, with its initial values, on its device."""
    if init.kind != "normal":
        values.fill_(init.scale if init.kind == "ones" else 0.0)
        return
    if values.numel() == 0:
        return
    if not part.shape:
        values, part = values.view(1), ShardSpec.whole((1,))
    flat = values.detach().contiguous().view(-1, values.shape[-1])
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")
    rows, words = _counters(part, values.device)
    rows.mul_(wrap(GAMMA)).add_(wrap(key))
    words.mul_(wrap(GAMMA))
    unused = part.start[-1] % 2  # the first word's first number, if the shard begins with its second

    for of_rows, of_words in _chunks(rows.shape[0], words.shape[0], values.device):
        numbers = truncated_normal(splitmix64(rows[of_rows] + words[of_words]), init.std * init.scale)
        first = 2 * of_words.start - unused
        target = flat[of_rows, max(first, 0) : first + numbers.shape[1]]
        target.copy_(numbers[:, max(-first, 0) :][:, : target.shape[1]])
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat.view(values.shape))


def _counters(part: ShardSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters of the random words of a shard, as the sum of a column [rows, 1] and a row [words].

    A word holds two neighbours of the last dim; rows of the parameter, over all other dims, begin with a new word.
    """
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for extent, start, size in zip(part.shape[:-1], part.start[:-1], part.size[:-1], strict=True):
        rows = (rows[:, None] * extent + torch.arange(start, start + size, device=device)).flatten()
    start, end = part.start[-1], part.start[-1] + part.size[-1]
    return rows[:, None] * -(-part.shape[-1] // 2), torch.arange(start // 2, -(-end // 2), device=device)


def _chunks(rows: int, words: int, device: torch.device) -> list[tuple[slice, slice]]:
    """Blocks of a matrix of random words, of bounded size."""
    limit = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    height = max(1, limit // words)
    return [
        (slice(row, row + height), slice(word, word + limit))
        for row in range(0, rows, height)
        for word in range(0, words, limit)
    ]
