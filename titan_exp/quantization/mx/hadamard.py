"""The randomized Hadamard transform of 16 tokens: it spreads an outlier over all of them before they are rounded.

It is orthogonal, so that a product over tokens of which both sides are transformed is the same. One fixed vector of
signs serves every projection, rank and run, so there is no state to save and none to agree about.
"""

import torch
from torch import Tensor

SIZE = 16

SIGNS: tuple[int, ...] = (1, 1, -1, 1, -1, -1, 1, -1, -1, -1, 1, 1, 1, -1, 1, -1)
"""Drawn once; what matters is that they follow no row of the Hadamard matrix."""

_NEGATIVE = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)


def transformed(matrix: Tensor) -> Tensor:
    """The transpose of a matrix, each group of 16 of its rows transformed, in its type.

    Args:
        matrix: [tokens, columns], tokens a multiple of 16.

    Returns:
        [columns, tokens]
    """
    groups = matrix.t().reshape(-1, SIZE)
    return torch.mm(groups, transform(matrix.device, matrix.dtype)).view(matrix.shape[1], matrix.shape[0])


def transform(device: torch.device, dtype: torch.dtype) -> Tensor:
    """diag(signs) · H / 4, [16, 16]: H[i, j] is minus one to the number of bits that i and j share (Sylvester).

    Computed on the device: copying it there would make the host wait.
    """
    place = torch.arange(SIZE, device=device)
    shared = place[:, None] & place
    shared = shared ^ (shared >> 2)
    odd = (shared ^ (shared >> 1)) & 1
    negative = (_NEGATIVE >> place)[:, None] & 1
    return (0.25 - 0.5 * (odd ^ negative)).to(dtype)
