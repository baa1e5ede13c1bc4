"""Randomized Hadamard transform of 16 tokens, which spreads outliers before rounding.

It is orthogonal, so a matmul over transformed tokens is unchanged. One fixed sign vector serves all layers, ranks and
runs, so that there is no state.
"""

import torch
from torch import Tensor

SIZE = 16

SIGNS: tuple[int, ...] = (1, 1, -1, 1, -1, -1, 1, -1, -1, -1, 1, 1, 1, -1, 1, -1)
"""Signs, drawn once; they follow no row of the Hadamard matrix."""

_NEGATIVE = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)


def transformed(matrix: Tensor) -> Tensor:
    """Transform groups of 16 rows of a matrix [tokens, columns] and transpose it: [columns, tokens], same dtype."""
    groups = matrix.t().reshape(-1, SIZE)
    return torch.mm(groups, transform(matrix.device, matrix.dtype)).view(matrix.shape[1], matrix.shape[0])


def transform(device: torch.device, dtype: torch.dtype) -> Tensor:
    """diag(signs) · H / 4, [16, 16], with H[i, j] = (-1)^popcount(i & j) (Sylvester).

    Computed on the device: a copy from the host would synchronize.
    """
    place = torch.arange(SIZE, device=device)
    shared = place[:, None] & place
    shared = shared ^ (shared >> 2)
    odd = (shared ^ (shared >> 1)) & 1
    negative = (_NEGATIVE >> place)[:, None] & 1
    return (0.25 - 0.5 * (odd ^ negative)).to(dtype)
