"""Adafactor (Shazeer and Stern 2018): a second moment kept as row and column means, no momentum."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.optimizer import AdafactorConfig as Config
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.matrices import COLUMNS, ROWS, ShardAxis, ShardedMatrix, sharded_like
from titan_exp.optim.optimizer import GroupOptimizer
from titan_exp.optim.parameter_groups import NamedParameter, parameter_groups


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build Adafactor."""
    return Adafactor(parameter_groups(parameters, config), config)


class Adafactor(GroupOptimizer):
    """Adafactor for plain tensors and DTensors; each matrix of a stack has its own means and scale. State: one element
    per row and per column of a matrix, sharded like the rows and columns; one per element of a vector. A step makes
    three all-reduces per group of parameters and sharding axis: of the sums over rows and columns and of the squared
    weights; of the sums of row means; of the squared updates. Each update is computed twice, so that only one is held
    at a time."""

    def __init__(self, groups: Iterable[dict[str, Any]], config: Config) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0})
        self._config = config

    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update all parameters, in shared messages."""
        axes = [ShardedMatrix.of(weight if weight.ndim > 1 else weight[None]).axes for weight in parameters]
        norms = self._track(parameters, axes)
        # Sums of this rank's row means of each matrix; zeros for vectors.
        totals = [
            local_tensor(state["row_variance"]).sum(ROWS, keepdim=True)
            if "row_variance" in (state := self.state[parameter])
            else local_tensor(state["variance"]).new_zeros(1)
            for parameter in parameters
        ]
        sum_over_shards([(total, _sharding(ROWS, found)) for total, found in zip(totals, axes, strict=True)])
        squares = [
            _square_sum(self._direction(parameter, total)) for parameter, total in zip(parameters, totals, strict=True)
        ]
        sum_over_shards(list(zip(squares, axes, strict=True)))
        for parameter, total, square, norm in zip(parameters, totals, squares, norms, strict=True):
            elements = parameter.shape[-2:].numel()
            step = float(self.state[parameter]["step"])
            size = (norm / elements).sqrt().clamp(min=self._config.min_rms) * min(group["lr"], step**-0.5)
            excess = ((square / elements).sqrt() / self._config.clip_threshold).clamp(min=1.0)
            weight = local_tensor(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            weight.sub_(self._direction(parameter, total).mul_(size / excess))

    def _track(self, parameters: Sequence[Tensor], axes: Sequence[tuple[ShardAxis, ...]]) -> list[Tensor]:
        """Update the second moments; returns the sum of squares of each matrix."""
        sums: list[tuple[Tensor, Sequence[ShardAxis]]] = []
        norms, found = [], []
        for parameter, shards in zip(parameters, axes, strict=True):
            weight, gradient = local_tensor(parameter), local_tensor(parameter.grad)  # type: ignore[arg-type]  # not None
            norms.append(_square_sum(weight))
            sums.append((norms[-1], shards))
            if parameter.ndim > 1:
                squares = gradient.square()
                means = squares.sum(COLUMNS, keepdim=True), squares.sum(ROWS, keepdim=True)
                sums += [(means[0], _sharding(COLUMNS, shards)), (means[1], _sharding(ROWS, shards))]
                found.append((means[0], parameter.shape[COLUMNS], means[1], parameter.shape[ROWS]))
            else:
                found.append((gradient.square(), 1, None, 1))
        sum_over_shards(sums)
        for parameter, (row, columns, column, rows) in zip(parameters, found, strict=True):
            state = self._state_of(parameter)
            state["step"] += 1
            share = float(state["step"]) ** self._config.beta2_decay
            if column is None:
                local_tensor(state["variance"]).lerp_(row, share)
            else:
                local_tensor(state["row_variance"]).lerp_(row / columns, share)
                local_tensor(state["column_variance"]).lerp_(column / rows, share)
        return norms

    def _direction(self, parameter: Tensor, row_total: Tensor) -> Tensor:
        """Gradient over the root of its second moment."""
        state, smallest = self.state[parameter], self._config.eps
        if "variance" in state:
            variance = local_tensor(state["variance"]).clone()
        else:
            mean = (row_total / parameter.shape[ROWS]).clamp_(min=smallest)
            variance = local_tensor(state["row_variance"]) @ local_tensor(state["column_variance"])
            variance.div_(mean)
        gradient = local_tensor(parameter.grad)  # type: ignore[arg-type]  # not None
        return variance.clamp_(min=smallest**2).rsqrt_().mul_(gradient)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if state:
            return state
        state["step"] = torch.tensor(0.0)
        local, shape = local_tensor(parameter), parameter.shape
        if parameter.ndim == 1:
            state["variance"] = torch.zeros_like(parameter)
            return state
        rows, columns = local.new_zeros(*local.shape[:-1], 1), local.new_zeros(*local.shape[:-2], 1, local.shape[-1])
        state["row_variance"] = sharded_like(parameter, rows, (*shape[:-1], 1), ROWS)
        state["column_variance"] = sharded_like(parameter, columns, (*shape[:-2], 1, shape[-1]), COLUMNS)
        return state


def _square_sum(tensor: Tensor) -> Tensor:
    dims = (ROWS, COLUMNS) if tensor.ndim > 1 else (COLUMNS,)
    return tensor.square().sum(dims, keepdim=True)


def _sharding(dim: int, axes: Sequence[ShardAxis]) -> tuple[ShardAxis, ...]:
    return tuple(axis for axis in axes if axis.dim == dim)


def sum_over_shards(sums: Sequence[tuple[Tensor, Sequence[ShardAxis]]]) -> None:
    """Sum tensors in place, each over its axes, with one message per axis for all of them."""
    groups = {axis.group.group_name: axis.group for _, axes in sums for axis in axes}
    for name, group in groups.items():
        tensors = [tensor for tensor, axes in sums if any(axis.group.group_name == name for axis in axes)]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat, group=group)
        for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
