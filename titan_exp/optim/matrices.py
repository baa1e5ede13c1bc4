"""Matrices that optimizers update: how ranks shard them, projections in fused weights, owner ranks, rounding noise."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.adamw import adamw

from titan_exp.config.groups.optimizer import MatrixOptimizerConfig, SplitMatrixOptimizerConfig
from titan_exp.models.spec.tp_plan import FusedRows
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.optimizer import GroupOptimizer, adamw_state
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups

ROWS, COLUMNS = -2, -1  # dims of a matrix, after the expert dim of a stack
BATCH_ELEMENTS = 2**26  # number of matrix elements that a rank computes with at a time, unless one matrix is larger
NOISE = 1e-4  # magnitude of a number, relative to the largest of its matrix, at which half of it counts as signal


C = TypeVar("C", bound=MatrixOptimizerConfig)


class MatrixOptimizer(GroupOptimizer, Generic[C]):
    """Updates groups of matrices by `update_matrices`; others (embedding, head, vectors) by torch's fused AdamW."""

    def __init__(self, parameters: Sequence[NamedParameter], config: C) -> None:
        groups = [
            {**group, "matrices": matrices}
            for matrices in (True, False)
            for group in parameter_groups([named for named in parameters if named.is_matrix == matrices], config)
        ]
        defaults = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self.config = config
        self.named: Mapping[Tensor, NamedParameter] = {named.parameter: named for named in parameters}

    @abstractmethod
    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of a group that have gradients."""

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        (self.update_matrices if group["matrices"] else self._update_others)(parameters, group)

    def _update_others(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [adamw_state(self.state[parameter], parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(parameter) for parameter in parameters],
            [local_tensor(parameter.grad) for parameter in parameters],  # type: ignore[arg-type]  # not None
            [local_tensor(state["exp_avg"]) for state in states],
            [local_tensor(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(frozen=True)
class ShardAxis:
    """A mesh axis of several ranks that shards one dim of a matrix."""

    group: dist.ProcessGroup
    size: int
    rank: int
    dim: int  # `ROWS` or `COLUMNS`
    applied_last: bool  # True for FSDP over a dim that another axis shards too: it divides that axis's shards


@dataclass(frozen=True)
class ShardedMatrix:
    """Shape of the whole matrix, and the axes that shard it in mesh order; no axes if each rank has it whole. Axes that
    shard a stack by whole matrices, or that replicate it, are not among them."""

    rows: int
    columns: int
    axes: tuple[ShardAxis, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "ShardedMatrix":
        """Read the sharding of the last two dims of a plain tensor or DTensor."""
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
        """Shape of a shard padded to the first rank's, which is the largest."""
        sizes = {ROWS: self.rows, COLUMNS: self.columns}
        for axis in self.axes:
            sizes[axis.dim] = -(-sizes[axis.dim] // axis.size)
        return sizes[ROWS], sizes[COLUMNS]

    def pad(self, shard: Tensor) -> Tensor:
        """Pad a shard [..., rows, columns] with zeros to the size of the largest."""
        rows, columns = self.padded
        missing = (0, columns - shard.shape[COLUMNS], 0, rows - shard.shape[ROWS])
        return F.pad(shard, missing) if any(missing) else shard

    def join(self, shards: Tensor) -> Tensor:
        """Join all padded shards [*axes in mesh order, rows, columns] to the whole matrix."""
        left = list(self.axes)
        for axis in reversed(self._applied):
            place = left.index(axis)
            shards = torch.cat(shards.unbind(place), dim=axis.dim)
            del left[place]
        return shards[..., : self.rows, : self.columns]

    def split(self, matrix: Tensor) -> Tensor:
        """Split a whole matrix into all padded shards [*axes in mesh order, rows, columns]."""
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
    # A dim sharded twice has its own placement class, which is not a Shard on some torch versions.
    dim = getattr(placement, "dim", None)
    return None if dim is None else dim - dims if dim >= 0 else dim


def sharded_like(parameter: Tensor, local: Tensor, shape: Sequence[int], *dims: int) -> Tensor:
    """Make a state of this shape from this rank's part. It is sharded like it by stack and `dims`."""
    if not isinstance(parameter, DTensor):
        return local
    placements = [
        placement if sharded_dim(placement, parameter.ndim) in (*dims, ROWS - 1) else Replicate()
        for placement in parameter.placements
    ]
    whole = {"shape": torch.Size(shape), "stride": torch.empty(tuple(shape), device="meta").stride()}
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, **whole)


def local_matrices(tensor: Tensor) -> Tensor:
    """View this rank's part as a stack of matrices [matrices, rows, columns]."""
    local = local_tensor(tensor)
    return local if local.ndim == 3 else local[None]


@dataclass(frozen=True)
class MatrixWeight:
    """Parameter made of one matrix or a stack of matrices, and how each is split into pieces."""

    parameter: Tensor
    sharding: ShardedMatrix
    rows: FusedRows | None
    by_head: bool

    @classmethod
    def of(cls, named: NamedParameter, config: SplitMatrixOptimizerConfig) -> "MatrixWeight":
        """Choose a parameter's split by the configuration."""
        split = "fused" if named.rows is None else getattr(config, f"split_{named.rows.kind}")
        rows = None if split == "fused" else named.rows
        return cls(named.parameter, ShardedMatrix.of(named.parameter), rows, split == "head")

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of each piece."""
        rows, columns = self.sharding.rows, self.sharding.columns
        if self.rows is None:
            return [(rows, columns)]
        units = rows // self.rows.unit
        return [(piece.width * (1 if self.by_head else units * piece.heads), columns) for piece in self.rows.pieces]

    @property
    def counts(self) -> list[int]:
        """Number of matrices of each piece in one matrix of the parameter."""
        if self.rows is None or not self.by_head:
            return [1] * len(self.shapes)
        return [self.sharding.rows // self.rows.unit * piece.heads for piece in self.rows.pieces]

    @property
    def flops(self) -> float:
        """Work on one matrix, relative to that of other weights."""
        return self.sharding.rows * self.sharding.columns * min(self.sharding.rows, self.sharding.columns)

    @property
    def elements(self) -> int:
        """Number of elements in this rank's matrices, counted whole."""
        return len(local_matrices(self.parameter)) * self.sharding.rows * self.sharding.columns

    def split(self, weights: Tensor) -> list[Tensor]:
        """Split weights [..., rows, columns] into a stack [..., matrices, rows, columns] per piece, or into one."""
        if self.rows is None:
            return [weights.unsqueeze(-3)]
        leading, columns = weights.shape[:-2], weights.shape[-1]
        units = weights.unflatten(-2, (-1, self.rows.unit))
        sizes = [piece.heads * piece.width for piece in self.rows.pieces]
        # No dim may be -1, since a stack without matrices would not determine it.
        heights = [units.shape[-3] * size for size in sizes]
        return [
            part.reshape(*leading, *((height // piece.width, piece.width) if self.by_head else (1, height)), columns)
            for piece, part, height in zip(self.rows.pieces, units.split(sizes, dim=-2), heights, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join parts to weights; the inverse of `split`."""
        if self.rows is None:
            return parts[0].squeeze(-3)
        *leading, _, _, columns = parts[0].shape
        units = sum(part.shape[-3] * part.shape[-2] for part in parts) // self.rows.unit
        heights = [part.shape[-3] * part.shape[-2] // units for part in parts]
        stacks = [part.reshape(*leading, units, height, columns) for part, height in zip(parts, heights, strict=True)]
        return torch.cat(stacks, dim=-2).flatten(-3, -2)


class OwnerGroup:
    """Ranks that share matrices, numbered along the axes, the last fastest. One of them, the owner, computes each
    matrix. A matrix takes one all-to-all per mesh axis."""

    def __init__(self, axes: Sequence[ShardAxis]) -> None:
        self._axes = axes
        self.size = torch.Size(axis.size for axis in axes).numel()
        self.rank = 0
        for axis in axes:
            self.rank = self.rank * axis.size + axis.rank

    @classmethod
    def of(cls, weights: Sequence[MatrixWeight]) -> list[tuple["OwnerGroup", list[MatrixWeight]]]:
        """Group weights by the ranks that share them."""
        found = defaultdict[tuple[str, ...], list[MatrixWeight]](list)
        for weight in weights:
            found[tuple(axis.group.group_name for axis in weight.sharding.axes)].append(weight)
        return [(cls(few[0].sharding.axes), few) for few in found.values()]

    def assign(self, costs: Sequence[float]) -> list[int]:
        """Assign an owner to each matrix by cost: the costliest first, each to the rank with the least work. The result
        is the same on every rank. The first rank, which the planner traces, has the most work."""
        loads, owners = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            owners[index] = min(range(self.size), key=loads.__getitem__)
            loads[owners[index]] += costs[index]
        by_load = sorted(range(self.size), key=lambda rank: -loads[rank])
        return [by_load.index(owner) for owner in owners]

    def rounds(self, weights: Sequence[MatrixWeight]) -> Iterator[list[MatrixWeight]]:
        """Divide weights into rounds of at most `BATCH_ELEMENTS` elements per rank, at least one weight each."""
        few, elements = list[MatrixWeight](), 0
        for weight in weights:
            if few and elements + weight.elements > self.size * BATCH_ELEMENTS:
                yield few
                few, elements = [], 0
            few.append(weight)
            elements += weight.elements
        if few:
            yield few

    def gather(self, shards: Sequence[Tensor], owners: Sequence[int]) -> dict[int, Tensor]:
        """Gather the equal shards of the matrices that this rank owns, from every rank [*axes, *shard], by index."""
        held = dict(enumerate(shards))
        for place in reversed(range(len(self._axes))):
            axis = self._axes[place]
            held = _exchange_in(axis, held, {index: self._coordinate(owners[index], place) for index in held})
        return held

    def scatter(
        self, owned: Mapping[int, Tensor], shapes: Sequence[Sequence[int]], owners: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        """Return this rank's shard of every matrix, from owners of all shards [*axes, *shard], typed like `like`."""
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
    """Receive this rank's tensors from all ranks of an axis, stacked in a new first dim."""
    by_rank = [[index for index in held if destination[index] == rank] for rank in range(axis.size)]
    sent = torch.cat([held[index].flatten() for indices in by_rank for index in indices])
    counts = [sum(held[index].numel() for index in indices) for indices in by_rank]
    own, count = by_rank[axis.rank], counts[axis.rank]
    received = sent.new_empty(axis.size * count)
    dist.all_to_all_single(received, sent, [count] * axis.size, counts, group=axis.group)
    parts = received.view(axis.size, count).split([held[index].numel() for index in own], dim=1)
    return {index: part.reshape(axis.size, *held[index].shape) for index, part in zip(own, parts, strict=True)}


def _exchange_out(
    axis: ShardAxis, held: Mapping[int, Tensor], receiving: Mapping[int, tuple[int, tuple[int, ...]]], like: Tensor
) -> dict[int, Tensor]:
    """Receive tensors, by index, from the ranks of an axis that hold them; each sends the elements of its stack."""
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


def share_of_signal(squares: Tensor, largest: Tensor) -> Tensor:
    """Factors in [0, 1] for updates, from the squares of the numbers that they normalize: 0 for rounding noise, 1 far
    above it. Normalized noise would be as large as signal, and different in every layout. The factor is 1 up to 1e-8
    from ten times `NOISE` on, and 1e-8 below a tenth of it."""
    floor = (NOISE**2 * largest).clamp(min=torch.finfo(squares.dtype).tiny)
    return 1 / (1 + (floor / squares) ** 4)
