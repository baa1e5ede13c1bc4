"""Tensors of a checkpoint on disk: by name, in parts, none of them in memory until it is read."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

FULL_SLICE = slice(None)
"""All rows, or all columns."""


class TensorReader(Protocol):
    """What reads of one format have in common."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        ...

    def read(self, name: str, rows: slice = FULL_SLICE, columns: slice = FULL_SLICE) -> Tensor:
        """Consecutive rows of a tensor, and of a matrix consecutive columns of them, on the CPU; not to be written to.

        Nothing else is read from the disk, but for formats that hold pieces of tensors, which are read whole.
        """
        ...


def slice_tensor(tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    """The part of a tensor in memory."""
    return tensor[rows] if tensor.dim() < 2 else tensor[rows, columns]
