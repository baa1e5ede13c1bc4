"""Muon's update (Jordan et al. 2024; Liu et al. 2025): momentum, orthogonalized by Newton–Schulz on an owner rank."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.optim.matrices.matrix_optimizer import MatrixOptimizer
from titan_exp.optim.matrices.matrix_weight import MatrixWeight, rounds
from titan_exp.optim.matrices.newton_schulz import orthogonalize_all
from titan_exp.optim.matrices.owners import OwnerGroup, assign_owners
from titan_exp.optim.matrices.row_splits import join_rows, split_rows
from titan_exp.optim.matrices.sharded_matrix import local_matrices
from titan_exp.optim.muon import Config
from titan_exp.optim.parameter_groups import NamedParameter


class Muon(MatrixOptimizer):
    """Muon for plain tensors and DTensors; every matrix of a stack is orthogonalized alone.

    State: a momentum in fp32 per number, sharded like the parameter. A matrix that is sharded by rows or columns is
    gathered to one rank of its shard group, orthogonalized there, and the update scattered: per step each rank sends
    and receives its shards once in each direction in `precision`, in one all-to-all per sharding axis and direction
    for each round. A round is as many matrices as give every rank `BATCH_ELEMENTS` numbers, at least one; its
    workspace on a rank is about seven times these numbers, in `precision`. Replicas (HSDP) compute the same.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: Config) -> None:
        super().__init__(parameters, config)
        self._config, self._weights = config, dict[Tensor, MatrixWeight]()
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """One step; groups of parameters have one mesh, and axes of it differ by parameter."""
        by_axes = defaultdict(list)
        for parameter in parameters:
            weight = self._weight(parameter)
            by_axes[tuple(axis.group.group_name for axis in weight.sharding.axes)].append(weight)
        for weights in by_axes.values():
            owners = OwnerGroup(weights[0].sharding.axes)
            for few in rounds(weights, owners.size):
                self._update(few, owners, group)

    def _update(self, weights: Sequence[MatrixWeight], owners: OwnerGroup, group: dict[str, Any]) -> None:
        shards, matrix_weights = list[Tensor](), list[MatrixWeight]()
        for weight in weights:
            stack = weight.sharding.pad(self._direction(weight.parameter))
            shards += stack.unbind()
            matrix_weights += [weight] * len(stack)
        if not shards:
            return  # with more ranks than experts, some have none, and so do those that share their matrices
        updates = iter(self._orthogonalized(shards, matrix_weights, owners))
        for weight in weights:
            step_size = group["lr"] * self._config.matrix_scale(*weight.shapes[0])
            for matrix, update in zip(local_matrices(weight.parameter), updates, strict=False):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update[: matrix.shape[0], : matrix.shape[1]], alpha=-step_size)

    def _orthogonalized(
        self, shards: Sequence[Tensor], weights: Sequence[MatrixWeight], owners: OwnerGroup
    ) -> Sequence[Tensor]:
        """This rank's shards of the orthogonalized matrices, of which each owner computes its own."""
        owner_of = assign_owners([weight.flops for weight in weights], owners.size)
        gathered = owners.gather(shards, owner_of)
        parts: list[Tensor] = []
        for index, found in gathered.items():
            weight = weights[index]
            parts += split_rows(weight.sharding.join(found), weight.rows, by_head=weight.by_head)
        orthogonal = iter(orthogonalize_all(parts, self._config.newton_schulz_steps))
        done = {}
        for index in gathered:
            weight = weights[index]
            first, *others = weight.shapes
            pieces = [next(orthogonal)]
            # The scale of the first piece is applied in fp32, with the learning rate.
            pieces += [
                next(orthogonal) * (self._config.matrix_scale(*shape) / self._config.matrix_scale(*first))
                for shape in others
            ]
            done[index] = weight.sharding.split(join_rows(pieces, weight.rows))
        return owners.scatter(done, [shard.shape for shard in shards], owner_of, shards[0])

    def _direction(self, parameter: Tensor) -> Tensor:
        """Momentum after the gradient, with Nesterov's look-ahead, in the dtype of Newton–Schulz."""
        state, momentum = self.state[parameter], self._config.momentum
        if not state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient, kept = local_matrices(parameter.grad), local_matrices(state["momentum"])  # type: ignore[arg-type]
        kept.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(kept, momentum) if self._config.nesterov else kept).to(self._dtype)

    def _weight(self, parameter: Tensor) -> MatrixWeight:
        if parameter not in self._weights:
            self._weights[parameter] = MatrixWeight.of(self.named[parameter], self._config)
        return self._weights[parameter]
