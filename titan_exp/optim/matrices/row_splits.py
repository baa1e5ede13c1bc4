"""Split the rows of a fused weight into the matrices of its projections or heads, and join them again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_exp.models.spec.fused_rows import FusedRows


def split_rows(weight: Tensor, rows: FusedRows | None, *, by_head: bool) -> list[Tensor]:
    """Stacks of matrices [..., matrices, rows, columns] of weights [..., rows, columns]; one stack of these themselves
    if `rows` is None."""
    if rows is None:
        return [weight.unsqueeze(-3)]
    leading, columns = weight.shape[:-2], weight.shape[-1]
    units = weight.unflatten(-2, (-1, rows.unit))
    sizes = [piece.heads * piece.width for piece in rows.pieces]
    return [
        part.reshape(*leading, -1, piece.width, columns) if by_head else part.reshape(*leading, 1, -1, columns)
        for piece, part in zip(rows.pieces, units.split(sizes, dim=-2), strict=True)
    ]


def join_rows(parts: Sequence[Tensor], rows: FusedRows | None) -> Tensor:
    """Weights of these parts: the inverse of `split_rows`."""
    if rows is None:
        return parts[0].squeeze(-3)
    *leading, _, _, columns = parts[0].shape
    units = sum(part.shape[-3] * part.shape[-2] for part in parts) // rows.unit
    return torch.cat([part.reshape(*leading, units, -1, columns) for part in parts], dim=-2).flatten(-3, -2)
