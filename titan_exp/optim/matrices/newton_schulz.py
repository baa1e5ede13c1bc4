"""Newton–Schulz orthogonalization (Jordan et al. 2024): a polynomial that brings all singular values near 1."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Quintic with the steepest slope at 0 whose iterates stay in [0.7, 1.2]."""
BATCH_ELEMENTS = 2**26
"""Elements of the matrices that are orthogonalized in one batch, unless one matrix is larger."""


def orthogonalize(matrices: Tensor, steps: int, eps: float = 1e-7) -> Tensor:
    """Approximate nearest semi-orthogonal matrices of a stack [matrices, rows, columns], in its dtype.

    Needs 3 · rows · columns + 3 · min(rows, columns)² numbers per matrix beside the input; 4 · steps · min(rows,
    columns)² · (max + min / 2) FLOPs.
    """
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
    """`orthogonalize` of stacks of different shapes, those of equal shape in one batch."""
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
