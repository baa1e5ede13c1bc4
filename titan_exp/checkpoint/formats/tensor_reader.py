"""Lazy tensor reader interface: tensors of a checkpoint by name, read in slices."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

FULL_SLICE = slice(None)


class TensorReader(Protocol):
    """Reader of one checkpoint format."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape by tensor name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        ...

    def read(self, name: str, rows: slice = FULL_SLICE, columns: slice = FULL_SLICE) -> Tensor:
        """Read consecutive rows (and columns of a matrix) to the CPU; the result is read-only.

        Only the slice is read from disk, or whole shards in sharded formats.
        """
        ...


def slice_tensor(tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    """Slice a tensor in memory."""
    return tensor[rows] if tensor.dim() < 2 else tensor[rows, columns]
