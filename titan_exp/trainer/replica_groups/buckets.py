"""Buckets of tensors for collectives between replica groups."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Bytes of a bucket; a larger tensor has one of its own."""


@torch.no_grad()
def exchange(tensors: Sequence[Tensor], operation: Callable[[Tensor], object], *, write_back: bool) -> None:
    """Call `operation` on flat copies of the tensors, bucket by bucket, and copy the results back if `write_back`."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        operation(flat)
        if write_back:
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and at most `BUCKET_BYTES`; the same on equal ranks of all groups."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
