"""Gather whole matrices to owner ranks, and send results back: each matrix is computed with once, by one rank.

Over several mesh axes (FSDP and tensor parallelism) a matrix takes one all-to-all per axis, so no process group is
needed beside the mesh's.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.optim.matrices.sharded_matrix import ShardAxis


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Owner of each matrix: the costliest first, each to the rank with the least work. The same on every rank.

    The first rank, which the planner traces, has the most work.
    """
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    by_load = sorted(range(ranks), key=lambda rank: -loads[rank])
    return [by_load.index(owner) for owner in owners]


class OwnerGroup:
    """Ranks that share matrices, numbered along the axes, the last fastest."""

    def __init__(self, axes: Sequence[ShardAxis]) -> None:
        self._axes = axes
        self.size = torch.Size(axis.size for axis in axes).numel()
        self.rank = 0
        for axis in axes:
            self.rank = self.rank * axis.size + axis.rank

    def gather(self, shards: Sequence[Tensor], owners: Sequence[int]) -> dict[int, Tensor]:
        """Shards of the matrices that this rank owns, from every rank [*axes, *shard], by index.

        Each matrix's shards have equal shapes on all ranks.
        """
        held = dict(enumerate(shards))
        for place in reversed(range(len(self._axes))):
            axis = self._axes[place]
            held = _exchange_in(axis, held, {index: self._coordinate(owners[index], place) for index in held})
        return held

    def scatter(
        self, owned: Mapping[int, Tensor], shapes: Sequence[Sequence[int]], owners: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        """This rank's shard of every matrix, from owners that have all shards [*axes, *shard] of theirs.

        `like` has the dtype and device.
        """
        held, sizes = dict(owned), [axis.size for axis in self._axes]
        for place, axis in enumerate(self._axes):
            later = range(place + 1, len(self._axes))
            receiving = {
                index: (self._coordinate(owner, place), (*sizes[place + 1 :], *shapes[index]))
                for index, owner in enumerate(owners)
                if all(self._coordinate(owner, other) == self._axes[other].rank for other in later)
            }
            held = _exchange_out(axis, held, receiving, like)
        return [held[index] for index in range(len(owners))]

    def _coordinate(self, owner: int, place: int) -> int:
        for axis in reversed(self._axes[place + 1 :]):
            owner //= axis.size
        return owner % self._axes[place].size


def _exchange_in(axis: ShardAxis, held: Mapping[int, Tensor], destination: Mapping[int, int]) -> dict[int, Tensor]:
    """Tensors for this rank from all ranks of an axis, stacked in a new first dim."""
    by_rank = [[index for index in held if destination[index] == rank] for rank in range(axis.size)]
    sent = torch.cat([held[index].flatten() for indices in by_rank for index in indices])
    counts = [sum(held[index].numel() for index in indices) for indices in by_rank]
    own, count = by_rank[axis.rank], counts[axis.rank]
    received = sent.new_empty(axis.size * count)
    dist.all_to_all_single(received, sent, [count] * axis.size, counts, group=axis.group)
    parts = received.view(axis.size, count).split([held[index].numel() for index in own], dim=1)
    return {index: part.reshape(axis.size, *held[index].shape) for index, part in zip(own, parts, strict=True)}


def _exchange_out(
    axis: ShardAxis,
    held: Mapping[int, Tensor],
    receiving: Mapping[int, tuple[int, tuple[int, ...]]],
    like: Tensor,
) -> dict[int, Tensor]:
    """Tensors by index from the ranks of an axis that hold them, each of which sends its stack's elements."""
    by_rank = [[index for index, (rank, _) in receiving.items() if rank == source] for source in range(axis.size)]
    shapes = {index: torch.Size(shape) for index, (_, shape) in receiving.items()}
    own = by_rank[axis.rank]
    parts = [held[index][rank].flatten() for rank in range(axis.size) for index in own]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    count = sum(shapes[index].numel() for index in own)
    counts = [sum(shapes[index].numel() for index in indices) for indices in by_rank]
    received = sent.new_empty(sum(counts))
    dist.all_to_all_single(received, sent, counts, [count] * axis.size, group=axis.group)
    order = [index for indices in by_rank for index in indices]
    split = received.split([shapes[index].numel() for index in order])
    return {index: part.view(shapes[index]) for index, part in zip(order, split, strict=True)}
