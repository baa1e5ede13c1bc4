"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's preconditioner for matrices, AdamW for the rest."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.optimizer import SoapConfig as Config
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.matrices import (
    BATCH_ELEMENTS,
    COLUMNS,
    NOISE,
    ROWS,
    MatrixOptimizer,
    MatrixWeight,
    OwnerGroup,
    local_matrices,
    sharded_like,
    share_of_signal,
)
from titan_exp.optim.parameter_groups import NamedParameter

SIDES = {"left": ROWS, "right": COLUMNS}  # sides of a matrix, and the dim that each side's basis rotates


def build(parameters: Sequence[NamedParameter], config: Config) -> torch.optim.Optimizer:
    """Build SOAP."""
    return Soap(parameters, config)


class Soap(MatrixOptimizer[Config]):
    """SOAP for plain tensors and DTensors; every matrix of a stack has its own bases.

    State is in fp32, on the matrix's owner: one of the ranks that shard its rows or columns. It has two moments, the
    second of rotated gradients, and for each rotated side of size n a covariance and a basis of n² elements each.
    Owners are assigned by size of state; stacks of experts stay whole. Per step, the gradient is gathered to the owner
    and the update scattered, in fp32, with as many all-to-alls as in Muon. Replicas (HSDP) compute the same.

    The first step only computes the bases, as in the authors' implementation; later steps add their gradient to the
    covariances after the update. Signs of eigenvectors cancel: the first moment is kept unrotated, the second has none.
    """

    def __init__(self, parameters: Sequence[NamedParameter], config: Config) -> None:
        super().__init__(parameters, config)
        matrices = [MatrixWeight.of(named, config) for named in parameters if named.is_matrix]
        self._weights = {weight.parameter: weight for weight in matrices}
        self._owner = dict[Tensor, int]()
        for owners, weights in OwnerGroup.of(matrices):
            ranks = owners.assign([self._numbers(weight) for weight in weights])
            self._owner |= {weight.parameter: rank for weight, rank in zip(weights, ranks, strict=True)}

    def update_matrices(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the matrices of a group, which may be sharded over different axes of one mesh."""
        for owners, weights in OwnerGroup.of([self._weights[parameter] for parameter in parameters]):
            # Owners take turns, so that all of them work in every round.
            turns, keyed = defaultdict[int, int](int), list[tuple[int, int]]()
            for index, weight in enumerate(weights):
                owner = self._owner[weight.parameter]
                keyed.append((turns[owner], index))
                turns[owner] += 1
            for few in owners.rounds([weights[index] for _, index in sorted(keyed)]):
                self._update(few, owners, group)

    def _numbers(self, weight: MatrixWeight) -> int:
        """Number of state elements of a weight."""
        stack = weight.elements // (weight.sharding.rows * weight.sharding.columns)
        return stack * sum(
            count * (2 * shape[0] * shape[1] + sum(2 * shape[SIDES[side]] ** 2 for side in self._sides(shape)))
            for shape, count in zip(weight.shapes, weight.counts, strict=True)
        )

    def _sides(self, shape: Sequence[int]) -> list[str]:
        """Rotated sides of matrices [..., rows, columns]; for square matrices, the left side counts as smaller."""
        sides = [side for side, dim in SIDES.items() if shape[dim] <= self.config.max_dim]
        smaller = "left" if shape[ROWS] <= shape[COLUMNS] else "right"
        return sides if self.config.sides == "both" else [side for side in sides if side == smaller]

    def _update(self, weights: Sequence[MatrixWeight], owners: OwnerGroup, group: dict[str, Any]) -> None:
        gradients = [local_matrices(weight.parameter.grad).float() for weight in weights]  # type: ignore[arg-type]
        shards = [weight.sharding.pad(gradient) for weight, gradient in zip(weights, gradients, strict=True)]
        owner_of = [self._owner[weight.parameter] for weight in weights]
        done = {}
        for index, found in owners.gather(shards, owner_of).items():
            weight = weights[index]
            done[index] = weight.sharding.split(self._direction(weight, weight.sharding.join(found), group))
        updates = owners.scatter(done, [shard.shape for shard in shards], owner_of, shards[0])
        for weight, update in zip(weights, updates, strict=True):
            matrices = local_matrices(weight.parameter)
            matrices.mul_(1 - group["lr"] * group["weight_decay"])
            matrices.add_(update[:, : matrices.shape[ROWS], : matrices.shape[COLUMNS]], alpha=-group["lr"])

    def _direction(self, weight: MatrixWeight, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Update of whole matrices [matrices, rows, columns], before the learning rate."""
        names = [""] if weight.rows is None else [f"_{piece.name}" for piece in weight.rows.pieces]
        pieces = weight.split(gradient)
        state = self.state[weight.parameter]
        is_first = not state
        state["step"] = torch.tensor(0.0) if is_first else state["step"].add_(1)
        directions = []
        for name, piece in zip(names, pieces, strict=True):
            if is_first:
                self._allocate(weight.parameter, state, name, piece)
            kept = {
                key: local_tensor(value).view(-1, *value.shape[-2:])
                for key in ("exp_avg", "exp_avg_sq", *SIDES, *(f"{side}_basis" for side in SIDES))
                if (value := state.get(f"{key}{name}")) is not None
            }
            matrices = piece.reshape(-1, *piece.shape[-2:])
            update = self._first_bases if is_first else self._rotated_adam
            few = max(1, BATCH_ELEMENTS // matrices.shape[-2:].numel())
            found = [
                update(part, {key: value[index * few : (index + 1) * few] for key, value in kept.items()}, state, group)
                for index, part in enumerate(matrices.split(few))
            ]
            directions.append((torch.cat(found) if len(found) > 1 else found[0]).view_as(piece))
        return weight.join(directions)

    def _first_bases(
        self, gradient: Tensor, kept: Mapping[str, Tensor], state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        for side in SIDES:
            if side in kept:
                # fp64, because eigenvectors of small eigenvalues would be rounding noise, different in every layout.
                covariance = _covariance(gradient.double(), side)
                # An eigensolver raises for numbers that are not finite; the trainer reports them.
                finite = covariance.where(covariance.isfinite(), 0)
                kept[side].lerp_(covariance.float(), 1 - group["betas"][1])
                kept[f"{side}_basis"].copy_(initial_basis(finite))
        return torch.zeros_like(gradient)

    def _rotated_adam(
        self, gradient: Tensor, kept: Mapping[str, Tensor], state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        (beta1, beta2), step = group["betas"], float(state["step"])
        mean, square = kept["exp_avg"].lerp_(gradient, 1 - beta1), kept["exp_avg_sq"]
        rotated = _rotate(gradient, kept)
        square.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = _rotate(mean, kept).div_(root).div_(1 - beta1**step)
        if any(side in kept for side in SIDES):  # a rotation spreads the rounding of large numbers over small ones
            update.mul_(share_of_signal(square, square.amax((ROWS, COLUMNS), keepdim=True)))
            update = _rotate(update, kept, back=True)
        for side in (side for side in SIDES if side in kept):
            kept[side].lerp_(_covariance(gradient, side), 1 - beta2)
            if step % self.config.precondition_every == 0:
                basis, order = iterated_basis(kept[side], kept[f"{side}_basis"])
                kept[f"{side}_basis"].copy_(basis)
                index = order.unsqueeze(-1 if side == "left" else -2).expand_as(square)
                square.copy_(square.gather(SIDES[side], index))
        return update

    def _allocate(self, parameter: Tensor, state: dict[str, Tensor], name: str, piece: Tensor) -> None:
        *leading, rows, columns = piece.shape
        shapes = {"exp_avg": (rows, columns), "exp_avg_sq": (rows, columns)}
        for side in self._sides((rows, columns)):
            size = piece.shape[SIDES[side]]
            shapes |= {side: (size, size), f"{side}_basis": (size, size)}
        for key, shape in shapes.items():
            local = piece.new_zeros(*leading, *shape)
            own = local[0] if parameter.ndim == 2 else local
            whole = (*parameter.shape[:-2], *own.shape[-3:])
            state[f"{key}{name}"] = sharded_like(parameter, own, whole)


def _covariance(gradient: Tensor, side: str) -> Tensor:
    return gradient @ gradient.mT if side == "left" else gradient.mT @ gradient


def _rotate(matrices: Tensor, kept: Mapping[str, Tensor], *, back: bool = False) -> Tensor:
    """Rotate matrices into the bases, or `back` from them; returns a new tensor."""
    left, right = kept.get("left_basis"), kept.get("right_basis")
    if left is None and right is None:
        return matrices.clone()
    if left is not None:
        matrices = (left if back else left.mT) @ matrices
    return matrices if right is None else matrices @ (right.mT if back else right)


def initial_basis(covariance: Tensor) -> Tensor:
    """Eigenvectors [matrices, size, size] of gradient covariances, by falling eigenvalue. A gradient with fewer
    directions than columns has rounding noise in the others, so their eigenvectors differ with every rounding. A small
    diagonal of distinct numbers, larger than its square, decides them instead."""
    largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None]
    ramp = torch.linspace(2, 1, covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    scale = torch.where(largest > 0, NOISE**2 * largest, 1.0)
    return torch.linalg.eigh(covariance + (scale * ramp).diag_embed()).eigenvectors.flip(-1)


def iterated_basis(covariance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Improve a basis by one step of power iteration; also returns the order of the former columns by falling Rayleigh
    quotient. The covariance is shifted by its rounding error, so directions below it keep their place instead of
    following noise, and columns whose quotients differ by less keep their order. The signs of columns are arbitrary,
    since an update in the basis does not depend on them."""
    power = covariance @ basis
    quotients = (basis * power).sum(-2)
    shift = torch.finfo(covariance.dtype).eps * covariance.shape[-1] * quotients.amax(-1)
    power += shift[..., None, None] * basis
    ranks = (quotients / shift[..., None].clamp(min=torch.finfo(covariance.dtype).tiny)).round()
    order = ranks.argsort(dim=-1, descending=True, stable=True)
    return torch.linalg.qr(power.gather(-1, order.unsqueeze(-2).expand_as(power))).Q, order
