"""Rows of a tensor written by torch.save, read without the rest of it.

The archive holds the bytes of a contiguous tensor uncompressed, row after row, at an offset that torch.load finds under
FakeTensorMode, which reads no data.
"""

from collections.abc import Sequence
from typing import IO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index

PIECE_BYTES = 2**24
"""Bytes of rows in memory beside the target, at least one row."""


def read_saved(file: IO[bytes], starts: Sequence[int], target: Tensor) -> None:
    """Copy the window of `target`'s shape that begins at `starts` of the file's only tensor; runs no code of the file.

    Raises EOFError if the file is cut off, ValueError if its tensor is smaller, and what torch.load raises if it is
    damaged.
    """
    with FakeTensorMode():
        saved = torch.load(file, weights_only=True)
    ends = [start + size for start, size in zip(starts, target.shape, strict=True)]
    if saved.dim() != target.dim() or any(end > size for end, size in zip(ends, saved.shape, strict=True)):
        raise ValueError(f"a part of shape {list(saved.shape)} is listed up to {ends}")
    if not saved.dim() or not saved.is_contiguous():
        file.seek(0)
        target.copy_(narrow_tensor_by_index(torch.load(file, weights_only=True), starts, target.shape))
        return
    row = saved[0].numel()
    count = max(1, PIECE_BYTES // max(1, row * saved.itemsize))
    begin = saved.untyped_storage()._checkpoint_offset + (saved.storage_offset() + starts[0] * row) * saved.itemsize
    file.seek(begin)
    for rows in target.split(count):
        piece = torch.empty((len(rows), *saved.shape[1:]), dtype=saved.dtype)
        _fill(file, piece)
        rows.copy_(narrow_tensor_by_index(piece, [0, *starts[1:]], rows.shape))


def _fill(file: IO[bytes], tensor: Tensor) -> None:
    """Fill a contiguous tensor with the file's next bytes."""
    content = tensor.view(-1).view(torch.uint8).numpy().data
    while content:
        count = file.readinto(content)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("a tensor is cut off")
        content = content[count:]
