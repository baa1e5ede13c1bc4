"""Rounding noise in gradients of matrices: numbers so small that they are others where ranks sum in another order."""

import torch
from torch import Tensor

NOISE = 1e-4
"""Size of a number or a direction, relative to the largest of its matrix, at which half of it is taken for signal."""


def share_of_signal(squares: Tensor, largest: Tensor) -> Tensor:
    """Factors in [0, 1] of updates by the squares of what they normalize: 0 for rounding noise, 1 far above it.

    Normalized, noise would be as large as signal, and another in every layout. The factor is 1 to 1e-8 from ten times
    `NOISE` on, and 1e-8 below a tenth of it.
    """
    floor = (NOISE**2 * largest).clamp(min=torch.finfo(squares.dtype).tiny)
    return 1 / (1 + (floor / squares) ** 4)
