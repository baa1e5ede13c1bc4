"""Bytes that replica groups send each other."""

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor


def ring_bytes(size: int, groups: int) -> float:
    """Bytes that one member of a ring all-reduce sends for a tensor of `size` bytes."""
    return 2 * (groups - 1) / groups * size


def planned_bytes_per_token(
    parameters: Iterable[Tensor], *, ranks: int, groups: int, interval: int, tokens: int
) -> float:
    """Bytes that all groups send for every token, if they synchronize fp32 numbers for these parameters of a rank.

    `ranks` is the number of ranks of a group, and `tokens` those of a step of all groups.
    """
    size = 0
    for parameter in parameters:
        copies = ranks
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    copies //= parameter.device_mesh.size(axis)
        size += 4 * parameter.numel() * copies
    return groups * ring_bytes(size, groups) / (interval * tokens)
