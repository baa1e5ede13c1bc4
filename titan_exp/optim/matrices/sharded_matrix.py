"""Sharding of a matrix, or of each matrix in a stack, over ranks: mesh axes that shard its rows or columns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from titan_exp.ops.local_tensor import local_tensor

ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class ShardAxis:
    """A mesh axis of several ranks that shards one dim of a matrix."""

    group: dist.ProcessGroup
    """Ranks with different shards, in order."""
    size: int
    """Number of ranks."""
    rank: int
    """This rank's index."""
    dim: int
    """`ROWS` or `COLUMNS`."""
    applied_last: bool
    """True for FSDP over a dim that another axis shards too: it divides that axis's shards, though it comes first in
    the mesh."""


@dataclass(frozen=True)
class ShardedMatrix:
    """Shape of the whole matrix, and the axes in mesh order that shard it; none if each rank has it whole.

    Axes over which a stack is sharded by whole matrices are not among them, nor are axes that replicate it.
    """

    rows: int
    columns: int
    axes: tuple[ShardAxis, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "ShardedMatrix":
        """Sharding of the last two dims of a plain tensor or DTensor."""
        rows, columns = tensor.shape[ROWS:]
        if not isinstance(tensor, DTensor):
            return cls(rows, columns, ())
        mesh, axes = tensor.device_mesh, list[ShardAxis]()
        for index, placement in enumerate(tensor.placements):
            dim = sharded_dim(placement, tensor.ndim)
            if dim in (ROWS, COLUMNS) and mesh.size(index) > 1:
                assert dim is not None
                group, strided = mesh.get_group(index), type(placement) is not Shard
                axes.append(ShardAxis(group, mesh.size(index), mesh.get_local_rank(index), dim, strided))
        found = cls(rows, columns, tuple(axes))
        for dim in (ROWS, COLUMNS):
            degrees = [axis.size for axis in axes if axis.dim == dim]
            even = tensor.shape[dim] % torch.Size(degrees).numel() == 0
            assert len(degrees) < 2 or even, "FSDP shards another dim of weights that are not divisible"
        return found

    @property
    def padded(self) -> tuple[int, int]:
        """Shape of a shard padded to that of the first rank, which is the largest."""
        sizes = {ROWS: self.rows, COLUMNS: self.columns}
        for axis in self.axes:
            sizes[axis.dim] = -(-sizes[axis.dim] // axis.size)
        return sizes[ROWS], sizes[COLUMNS]

    def pad(self, shard: Tensor) -> Tensor:
        """A shard [..., rows, columns] with zeros up to the size of the largest."""
        rows, columns = self.padded
        missing = (0, columns - shard.shape[COLUMNS], 0, rows - shard.shape[ROWS])
        return F.pad(shard, missing) if any(missing) else shard

    def join(self, shards: Tensor) -> Tensor:
        """Whole matrix from all padded shards [*axes in mesh order, rows, columns]."""
        left = list(self.axes)
        for axis in reversed(self._applied):
            place = left.index(axis)
            shards = torch.cat(shards.unbind(place), dim=axis.dim)
            del left[place]
        return shards[..., : self.rows, : self.columns]

    def split(self, matrix: Tensor) -> Tensor:
        """All padded shards [*axes in mesh order, rows, columns] of a whole matrix."""
        taken = list[ShardAxis]()
        for axis in self._applied:
            size = matrix.shape[axis.dim]
            missing = -(-size // axis.size) * axis.size - size
            padding = (0, missing) if axis.dim == COLUMNS else (0, 0, 0, missing)
            matrix = torch.stack((F.pad(matrix, padding) if missing else matrix).chunk(axis.size, dim=axis.dim))
            taken.insert(0, axis)
        order = [taken.index(axis) for axis in self.axes]
        return matrix.permute(*order, *range(len(order), matrix.ndim))

    @property
    def _applied(self) -> list[ShardAxis]:
        return sorted(self.axes, key=lambda axis: axis.applied_last)


def sharded_dim(placement: Placement, dims: int) -> int | None:
    """Dim that a placement shards, counted from the end; None for a replicated tensor."""
    # A dim sharded twice has its own placement class, which on some torch versions is no Shard.
    dim = getattr(placement, "dim", None)
    return None if dim is None else dim - dims if dim >= 0 else dim


def sharded_like(parameter: Tensor, local: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    """State of this shape and this rank's part of it, sharded like the parameter over axes that shard one of `dims`
    (counted from the end), and replicated over the others."""
    if not isinstance(parameter, DTensor):
        return local
    placements = [
        placement if sharded_dim(placement, parameter.ndim) in dims else Replicate()
        for placement in parameter.placements
    ]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def all_reduce(tensor: Tensor, axes: Sequence[ShardAxis], dim: int) -> Tensor:
    """Sum over the ranks that shard a dim, in place."""
    for axis in axes:
        if axis.dim == dim:
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def without(matrix: ShardedMatrix, dim: int, size: int) -> ShardedMatrix:
    """Sharding of a matrix that has `size` in place of `dim`, which is not sharded."""
    axes = tuple(axis for axis in matrix.axes if axis.dim != dim)
    return replace(matrix, axes=axes, **{"rows" if dim == ROWS else "columns": size})


def local_matrices(tensor: Tensor) -> Tensor:
    """View of this rank's part as a stack of matrices [matrices, rows, columns]."""
    local = local_tensor(tensor)
    return local if local.ndim == 3 else local[None]


def shard_axes(tensor: Tensor) -> tuple[ShardAxis, ...]:
    """Axes that shard the last two dims of a tensor, or the one of a vector."""
    if tensor.ndim > 1:
        return ShardedMatrix.of(tensor).axes
    return ShardedMatrix.of(tensor[None]).axes


def sum_over_shards(sums: Sequence[tuple[Tensor, Sequence[ShardAxis]]]) -> None:
    """Sum tensors in place, each over its axes, with one message per axis for all of them."""
    groups = {axis.group.group_name: axis.group for _, axes in sums for axis in axes}
    for name, group in groups.items():
        tensors = [tensor for tensor, axes in sums if any(axis.group.group_name == name for axis in axes)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
