"""Split the rows of a fused weight into the matrices of its projections or heads, and join them again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_exp.models.spec.fused_rows import FusedRows


def split_rows(weight: Tensor, rows: FusedRows | None, *, by_head: bool) -> list[Tensor]:
    """Stacks of matrices [matrices, rows, columns] of a weight [rows, columns]; itself in one if `rows` is None."""
    if rows is None:
        return [weight[None]]
    units = weight.unflatten(0, (-1, rows.unit))
    sizes = [piece.heads * piece.width for piece in rows.pieces]
    return [
        part.reshape(-1, piece.width, weight.shape[1]) if by_head else part.reshape(1, -1, weight.shape[1])
        for piece, part in zip(rows.pieces, units.split(sizes, dim=1), strict=True)
    ]


def join_rows(parts: Sequence[Tensor], rows: FusedRows | None) -> Tensor:
    """Weight of these parts: the inverse of `split_rows`."""
    if rows is None:
        return parts[0][0]
    units = sum(part.shape[0] * part.shape[1] for part in parts) // rows.unit
    return torch.cat([part.reshape(units, -1, part.shape[2]) for part in parts], dim=1).flatten(0, 1)
