"""Buckets of tensors for collectives between replica groups: flat copies in host memory.

Groups exchange them by Gloo over TCP. A killed group then leaves a closed connection, not a communicator of GPUs
that must be aborted on all others. Tensors of a GPU are copied to pinned memory and back on the current stream, which
has waited for the backward pass.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 64 * 2**20
"""Bytes of a bucket; a larger tensor has one of its own."""


def ring_bytes(size: float, groups: int) -> float:
    """Bytes that one member of a ring all-reduce, as Gloo's, sends for a tensor of `size` bytes."""
    return 2 * (groups - 1) / groups * size


@torch.no_grad()
def exchange(
    tensors: Sequence[Tensor], operation: Callable[[Tensor], object], *, read: bool = True, write_back: bool
) -> None:
    """Call `operation` on flat copies of the tensors, bucket by bucket, and copy the results back if `write_back`.
    Without `read`, the copies are uninitialized."""
    for bucket in _buckets(tensors):
        flat = _flat(bucket, read=read)
        operation(flat)
        if write_back:
            for tensor, part in zip(bucket, _parts(flat, [tensor.shape for tensor in bucket]), strict=True):
                tensor.copy_(part, non_blocking=True)
            _wait_for_copies(bucket)


class AsyncAllReduce:
    """Sum of tensors over the groups that runs in the background, in flat copies of their buckets."""

    def __init__(self) -> None:
        self._flat: list[Tensor] = []
        """Buckets whose sum has been started; no one touches them until it is done."""
        self._shapes: list[list[torch.Size]] = []
        """Shapes of the tensors in each."""
        self._devices: list[torch.device] = []
        """Device of the tensors in each."""
        self._works: list[tuple[Any, int]] = []
        """Their running collectives and bytes; none in a group that is alone."""
        self.summed_bytes = 0
        """Bytes of the buckets that have been summed."""

    @torch.no_grad()
    def start(self, tensors: Iterable[Tensor], begin: Callable[[Tensor], Any]) -> None:
        """Start to sum the tensors, which are copied as they come. `begin` returns the running collective of a bucket,
        or None without one."""
        for bucket in _buckets(tensors):
            self._flat.append(flat := _flat(bucket))
            self._shapes.append([tensor.shape for tensor in bucket])
            self._devices.append(bucket[0].device)
            work = begin(flat)
            if work is not None:
                self._works.append((work, flat.nbytes))

    def wait(self) -> None:
        """Wait for all of them, also if one has failed. Raises RuntimeError if one has."""
        failures: list[RuntimeError] = []
        for work, size in self._works:
            try:
                work.wait()
                self.summed_bytes += size
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    @property
    def sums(self) -> list[Tensor]:
        """Sums of the tensors, on their device; on a CPU they share memory with the buckets. After `wait`."""
        buckets = zip(self._flat, self._shapes, self._devices, strict=True)
        return [part for flat, shapes, device in buckets for part in _parts(flat.to(device), shapes)]


def _flat(bucket: Sequence[Tensor], *, read: bool = True) -> Tensor:
    """Flat host memory for a bucket; with `read`, a finished copy of it."""
    flat = _host_memory(bucket)
    if read:
        for tensor, part in zip(bucket, _parts(flat, [tensor.shape for tensor in bucket]), strict=True):
            part.copy_(tensor, non_blocking=True)
        _wait_for_copies(bucket)
    return flat


def _host_memory(bucket: Sequence[Tensor]) -> Tensor:
    pinned = any(tensor.device.type == "cuda" for tensor in bucket)
    return torch.empty(sum(tensor.numel() for tensor in bucket), dtype=bucket[0].dtype, pin_memory=pinned)


def _wait_for_copies(bucket: Sequence[Tensor]) -> None:
    """Wait for copies between the host and the devices of a bucket's tensors."""
    for device in {tensor.device for tensor in bucket if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _parts(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for shape, part in zip(shapes, parts, strict=True)]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
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
