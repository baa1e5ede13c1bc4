"""Lazy tensor reader interface: tensors of a checkpoint by name, read in slices."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class TensorReader(Protocol):
    """Reader of one checkpoint format."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by tensor name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        ...

    def read(self, name: str, *window: slice) -> Tensor:
        """Read a window to the CPU, one slice of step 1 per dim, later dims whole; the result is read-only.

        Only the window is read from disk, or whole shards in sharded formats.
        """
        ...


def window_extent(shape: Sequence[int], window: Sequence[slice]) -> tuple[list[int], list[int]]:
    """First index and size of a window in each dim of a tensor."""
    sliced = [range(*part.indices(size)) for part, size in zip(window, shape, strict=False)]
    whole = shape[len(sliced) :]
    return [*(part.start for part in sliced), *[0] * len(whole)], [*map(len, sliced), *whole]
