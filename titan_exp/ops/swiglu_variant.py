"""SwiGLU variant: clamps, sharpness and offset of the gate. Imports no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SwiGLUVariant:
    """Variant of SwiGLU: (up + offset) · gate · sigmoid(alpha · gate), with clamped gate and up."""

    alpha: float = 1.0  # factor inside the sigmoid
    limit: float | None = None  # upper bound of gate, and of |up|; None means no clamps
    offset: float = 0.0  # term added to up

    @property
    def numbers(self) -> dict[str, Any]:
        """Keyword arguments of operators and kernels, which take no dataclass."""
        return vars(self)


SWIGLU = SwiGLUVariant()  # plain SwiGLU (Shazeer 2020)
