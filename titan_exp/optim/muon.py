"""Muon (Jordan et al. 2024; Liu et al. 2025): orthogonalizes the momentum of matrices, and uses AdamW for the rest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.optimizer import MuonConfig as Config
from titan_exp.optim.matrices import BATCH_ELEMENTS, MatrixOptimizer, MatrixWeight, OwnerGroup, local_matrices
from titan_exp.optim.parameter_groups import NamedParameter

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton–Schulz coefficients: the quintic with the steepest slope at 0 whose iterates stay in [0.7, 1.2]."""


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build Muon."""
    return Muon(parameters, config)


class Muon(MatrixOptimizer[Config]):
    """Muon for plain tensors and DTensors; every matrix of a stack is orthogonalized alone.

    State: the momentum in fp32, sharded like the parameter. A matrix that is sharded by rows or columns is gathered to
    one rank of its shard group and orthogonalized there, and its update is scattered. Per step, each rank sends and
    receives its shards once in each direction, in `precision`, by one all-to-all per sharding axis, direction and
    round. A round has as many matrices as give every rank `BATCH_ELEMENTS` elements, at least one; its workspace on a
    rank is about seven times as many, in `precision`. Replicas (HSDP) compute the same.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: Config) -> None:
        super().__init__(parameters, config)
        matrices = [MatrixWeight.of(named, config) for named in parameters if named.is_matrix]
        self._weights = {weight.parameter: weight for weight in matrices}
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of a group, which may be sharded over different axes of one mesh."""
        for owners, weights in OwnerGroup.of([self._weights[parameter] for parameter in parameters]):
            for few in owners.rounds(weights):
                self._update(few, owners, group)

    def _update(self, weights: Sequence[MatrixWeight], owners: OwnerGroup, group: dict[str, Any]) -> None:
        shards, matrix_weights = list[Tensor](), list[MatrixWeight]()
        for weight in weights:
            stack = weight.sharding.pad(self._direction(weight.parameter))
            shards += stack.unbind()
            matrix_weights += [weight] * len(stack)
        if not shards:
            return  # with more ranks than experts, some ranks have none, and nor do the ranks that share their matrices
        updates = iter(self._orthogonalized(shards, matrix_weights, owners))
        for weight in weights:
            step_size = group["lr"] * self.config.matrix_scale(*weight.shapes[0])
            for matrix, update in zip(local_matrices(weight.parameter), updates, strict=False):
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update[: matrix.shape[0], : matrix.shape[1]], alpha=-step_size)

    def _orthogonalized(
        self, shards: Sequence[Tensor], weights: Sequence[MatrixWeight], owners: OwnerGroup
    ) -> Sequence[Tensor]:
        """Orthogonalize matrices, each on its owner; returns this rank's shards."""
        owner_of = owners.assign([weight.flops for weight in weights])
        gathered = owners.gather(shards, owner_of)
        parts: list[Tensor] = []
        for index, found in gathered.items():
            weight = weights[index]
            parts += weight.split(weight.sharding.join(found))
        orthogonal = iter(orthogonalize_all(parts, self.config.newton_schulz_steps))
        done = {}
        for index in gathered:
            weight = weights[index]
            first, *others = weight.shapes
            pieces = [next(orthogonal)]
            # The scale of the first piece is applied in fp32, with the learning rate.
            scale = self.config.matrix_scale
            pieces += [next(orthogonal) * (scale(*shape) / scale(*first)) for shape in others]
            done[index] = weight.sharding.split(weight.join(pieces))
        return owners.scatter(done, [shard.shape for shard in shards], owner_of, shards[0])

    def _direction(self, parameter: Tensor) -> Tensor:
        """Add the gradient to the momentum; returns Nesterov's look-ahead, in the dtype of Newton–Schulz."""
        state, momentum = self.state[parameter], self.config.momentum
        if not state:
            state["momentum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient, kept = local_matrices(parameter.grad), local_matrices(state["momentum"])  # type: ignore[arg-type]
        kept.lerp_(gradient, 1 - momentum)
        return (gradient.lerp(kept, momentum) if self.config.nesterov else kept).to(self._dtype)


def orthogonalize(matrices: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """Orthogonalize a stack [matrices, rows, columns] approximately, in its dtype, by Newton–Schulz (Jordan et al.
    2024): a polynomial that brings all singular values near 1. It needs 3 · rows · columns + 3 · min(rows, columns)²
    elements per matrix beside the input, and 4 · steps · min(rows, columns)² · (max + min / 2) FLOPs."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=x.dtype).clamp(min=eps)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def orthogonalize_all(matrices: Sequence[Tensor], steps: int) -> list[Tensor]:
    """Apply `orthogonalize` to stacks of different shapes; stacks of equal shape form one batch."""
    found: dict[int, Tensor] = {}
    for indices in _batches(matrices):
        stacks = [matrices[index] for index in indices]
        joined = orthogonalize(torch.cat(stacks) if len(stacks) > 1 else stacks[0], steps)
        found |= zip(indices, joined.split([len(stack) for stack in stacks]), strict=True)
    return [found[index] for index in range(len(matrices))]


def _batches(matrices: Sequence[Tensor]) -> list[list[int]]:
    batches: list[list[int]] = []
    open_batches: dict[tuple[int, ...], tuple[list[int], int]] = {}
    for index, stack in enumerate(matrices):
        batch, size = open_batches.get(tuple(stack.shape[1:]), ([], BATCH_ELEMENTS))
        if size + stack.numel() > BATCH_ELEMENTS:
            batch, size = [], 0
            batches.append(batch)
        batch.append(index)
        open_batches[tuple(stack.shape[1:])] = batch, size + stack.numel()
    return batches
