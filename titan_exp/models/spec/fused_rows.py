"""Fused projections: row layout of a weight that holds several projections, or one matrix per head."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RowPiece:
    """Consecutive rows of a unit that belong to one projection."""

    name: str
    """Projection (`query`)."""
    width: int
    """Rows per head; in a feed-forward per group."""
    heads: int = 1
    """Heads in a unit."""


@dataclass(frozen=True)
class FusedRows:
    """Units of rows with the same pieces, repeated through the weight."""

    kind: Literal["attention", "feed_forward"]
    """Kind of the projections; those of attention have heads."""
    pieces: tuple[RowPiece, ...]
    """Pieces of a unit in order."""

    @property
    def unit(self) -> int:
        """Rows of a unit."""
        return sum(piece.heads * piece.width for piece in self.pieces)
