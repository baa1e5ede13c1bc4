"""Dion (Ahn et al. 2025): orthonormalizes the momentum in a low rank, with error feedback and small messages."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.config.groups.optimizer import DionConfig as Config
from titan_exp.optim.matrices import (
    COLUMNS,
    ROWS,
    MatrixOptimizer,
    ShardAxis,
    ShardedMatrix,
    local_matrices,
    sharded_like,
    share_of_signal,
)
from titan_exp.optim.parameter_groups import NamedParameter

# This is the newer name, after torch 2.11.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build Dion."""
    return Dion(parameters, config)


class Dion(MatrixOptimizer[Config]):
    """Dion for plain tensors and DTensors; every matrix of a stack is updated alone. State: the momentum, sharded like
    the parameter, and the right factor [rank, columns], sharded like the columns. No rank gathers a matrix. For a
    matrix of rank r, messages are in fp32: the left factor [rows, r] is summed over ranks that shard columns, and
    gathered over ranks that shard rows, all of which orthonormalize it by QR. The right factor [r, columns] is summed
    over ranks that shard rows, and its r squared norms over ranks that shard columns."""

    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        sharding = ShardedMatrix.of(parameter)
        state = self._state_of(parameter, sharding)
        weight, momentum, right = (local_matrices(x) for x in (parameter, state["momentum"], state["right"]))
        momentum.add_(local_matrices(parameter.grad))  # type: ignore[arg-type]  # not None
        left = _orthonormal(_all_reduce(momentum @ right.mT, sharding.axes, COLUMNS), sharding)
        found = _all_reduce(left.mT @ momentum, sharding.axes, ROWS)
        momentum.baddbmm_(left, found, alpha=self.config.momentum - 1)
        squares = _all_reduce(found.square().sum(-1, keepdim=True), sharding.axes, COLUMNS)
        share = share_of_signal(squares, squares.amax(ROWS, keepdim=True))
        found.mul_(squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt_())
        # A momentum with fewer directions than the rank, such as an unused expert's, has noise in the others; their
        # factors stay.
        right.lerp_(found, share)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        step = found.mul_(share)
        weight.baddbmm_(left, step, alpha=-group["lr"] * self.config.matrix_scale(sharding.rows, sharding.columns))

    def _state_of(self, parameter: Tensor, sharding: ShardedMatrix) -> dict[str, Tensor]:
        state = self.state[parameter]
        if state:
            return state
        state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        rank = max(1, math.ceil(self.config.rank_fraction * min(sharding.rows, sharding.columns)))
        # The seed is a function of the name, so it is the same in every layout.
        generator = torch.Generator().manual_seed(zlib.crc32(self.named[parameter].name.encode()))
        whole = torch.randn(rank, sharding.columns, generator=generator)
        local = local_matrices(parameter)
        part = _own_shard(whole, _without(sharding, ROWS, rank))[:, : local.shape[-1]].to(local)
        part = part.expand(*local.shape[:-2], *part.shape).contiguous()
        shape = (*parameter.shape[:-2], rank, sharding.columns)
        own = part[0] if parameter.ndim == 2 else part
        state["right"] = sharded_like(parameter, own, shape, COLUMNS)
        return state


def _all_reduce(tensor: Tensor, axes: Sequence[ShardAxis], dim: int) -> Tensor:
    for axis in axes:
        if axis.dim == dim:
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def _without(matrix: ShardedMatrix, dim: int, size: int) -> ShardedMatrix:
    """Sharding of a matrix in which `dim` has `size` and is not sharded."""
    axes = tuple(axis for axis in matrix.axes if axis.dim != dim)
    return replace(matrix, axes=axes, **{"rows" if dim == ROWS else "columns": size})


def _orthonormal(left: Tensor, sharding: ShardedMatrix) -> Tensor:
    """Orthonormalize the columns of left factors [matrices, rows, rank]; returns this rank's rows of the basis."""
    factor, local_rows = _without(sharding, COLUMNS, left.shape[-1]), left.shape[-2]
    gathered = factor.pad(left)
    for axis in reversed(factor.axes):
        found = gathered.new_empty(axis.size * gathered.numel())
        _all_gather(found, gathered.flatten(), group=axis.group)
        gathered = found.view(axis.size, *gathered.shape)
    basis = torch.linalg.qr(factor.join(gathered)).Q
    return _own_shard(basis, factor)[..., :local_rows, :]


def _own_shard(matrix: Tensor, sharding: ShardedMatrix) -> Tensor:
    shards = sharding.split(matrix)
    for axis in sharding.axes:
        shards = shards[axis.rank]
    return shards
