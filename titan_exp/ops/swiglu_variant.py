"""SwiGLU variant: clamps, sharpness and offset of the gate. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SwiGLUVariant:
    """(up + offset) · gate · sigmoid(alpha · gate), of clamped gate and up."""

    alpha: float = 1.0
    """Factor inside the sigmoid."""
    limit: float | None = None
    """Upper bound of gate, and of |up|; None is no clamps."""
    offset: float = 0.0
    """Added to up."""


SWIGLU = SwiGLUVariant()
"""Plain SwiGLU (Shazeer 2020)."""
