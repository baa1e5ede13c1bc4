"""Split the rows of a fused weight into the matrices of its projections or heads, and join them again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_exp.models.spec.tp_plan import FusedRows


def split_rows(weight: Tensor, rows: FusedRows | None, *, by_head: bool) -> list[Tensor]:
    """Stacks of matrices [..., matrices, rows, columns] of weights [..., rows, columns]; one stack of these themselves
    if `rows` is None."""
    if rows is None:
        return [weight.unsqueeze(-3)]
    leading, columns = weight.shape[:-2], weight.shape[-1]
    units = weight.unflatten(-2, (-1, rows.unit))
    sizes = [piece.heads * piece.width for piece in rows.pieces]
    # Without a dim of -1: a stack without matrices would not determine it.
    heights = [units.shape[-3] * size for size in sizes]
    return [
        part.reshape(*leading, *((height // piece.width, piece.width) if by_head else (1, height)), columns)
        for piece, part, height in zip(rows.pieces, units.split(sizes, dim=-2), heights, strict=True)
    ]


def join_rows(parts: Sequence[Tensor], rows: FusedRows | None) -> Tensor:
    """Weights of these parts: the inverse of `split_rows`."""
    if rows is None:
        return parts[0].squeeze(-3)
    *leading, _, _, columns = parts[0].shape
    units = sum(part.shape[-3] * part.shape[-2] for part in parts) // rows.unit
    heights = [part.shape[-3] * part.shape[-2] // units for part in parts]
    stacks = [part.reshape(*leading, units, height, columns) for part, height in zip(parts, heights, strict=True)]
    return torch.cat(stacks, dim=-2).flatten(-3, -2)
