"""SwiGLU variant: clamps, sharpness and offset of the gate. Imports no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SwiGLUVariant:
    """Variant of SwiGLU: (up + offset) · gate · sigmoid(alpha · gate), with clamped gate and up."""

    alpha: float = 1.0
    """Factor inside the sigmoid."""
    limit: float | None = None
    """Upper bound of gate, and of |up|; None means no clamps."""
    offset: float = 0.0
    """Term added to up."""

    @property
    def numbers(self) -> dict[str, Any]:
        """Keyword arguments of operators and kernels, which take no dataclass."""
        return vars(self)


SWIGLU = SwiGLUVariant()
"""Plain SwiGLU (Shazeer 2020)."""
