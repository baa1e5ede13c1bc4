"""Received rows of a token exchange, sorted by expert."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int32
from torch import Tensor


@dataclass(frozen=True)
class Received:
    """Rows that a rank received for its experts."""

    rows: Float[Tensor, "received dim"]
    """Rows, sorted by expert, source rank and token."""
    weights: Float[Tensor, " received"] | None
    """Weight of each row, if sent."""
    ends: Int32[Tensor, " local"]
    """End of the rows of each of this rank's experts."""
    order: Any
    """Order or placement of the rows, by which the exchange gives them back."""
