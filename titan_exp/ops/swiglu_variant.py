"""SwiGLU variant: clamps, sharpness and offset of the gate. Imports no torch."""

from dataclasses import dataclass
from typing import TypedDict


class VariantNumbers(TypedDict):
    """Coefficients of a variant, as keyword arguments of operators and kernels."""

    alpha: float
    limit: float | None
    offset: float


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
    def numbers(self) -> VariantNumbers:
        """Keyword arguments of operators and kernels, which take no dataclass."""
        return {"alpha": self.alpha, "limit": self.limit, "offset": self.offset}


SWIGLU = SwiGLUVariant()
"""Plain SwiGLU (Shazeer 2020)."""
