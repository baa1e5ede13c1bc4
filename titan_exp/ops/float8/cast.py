"""A matrix in float8 as it is and transposed, from one read of it each for the largest values and for the casts.

Both products of a backward pass contract what the other keeps, and a GPU's float8 instructions want what they contract
to be contiguous: so an activation, and a gradient, is needed both ways.
"""

from typing import Any

import torch
from torch import Tensor

SIDE = 64
"""Rows and columns of the square that a program of the kernels reads."""


@torch.library.custom_op("titan_exp::dual_amax", mutates_args=())
def dual_amax(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Largest absolute values of the rows, [height, 1], and of the columns, [1, width], of a contiguous matrix; fp32,
    on CUDA (or anywhere in Triton's interpreter)."""
    from titan_exp.ops.float8.kernels import largest_kernel

    height, width = matrix.shape
    of_rows, of_columns = _largest_made(matrix)
    launch: Any = largest_kernel[_squares(matrix)]
    # Of numbers that are not negative the bits, as whole numbers, are in the same order.
    bits = of_rows.zero_().view(torch.int32), of_columns.zero_().view(torch.int32)
    launch(matrix, *bits, height, width, side=SIDE)
    return of_rows, of_columns


@torch.library.custom_op("titan_exp::dual_cast", mutates_args=())
def dual_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A contiguous matrix times its scales in float8, as it is and transposed; what lies beyond the largest number of
    the type is that.

    Args:
        matrix: [height, width].
        row_scales: fp32, [height, 1], of what stays as it is; or a scalar, for both.
        column_scales: fp32, [1, width], of what is transposed; or that scalar again.
        dtype: the float8 type.
    """
    from titan_exp.ops.float8.kernels import cast_kernel

    height, width = matrix.shape
    rows, transposed = _cast_made(matrix, row_scales, column_scales, dtype)
    launch: Any = cast_kernel[_squares(matrix)]
    launch(
        matrix,
        row_scales,
        column_scales,
        rows,
        transposed,
        height,
        width,
        torch.finfo(dtype).max,
        whole=row_scales.dim() == 0,
        side=SIDE,
    )
    return rows, transposed


@dual_amax.register_fake
def _largest_made(matrix: Tensor) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    fp32 = matrix.new_empty(height, 1, dtype=torch.float32)
    return fp32, matrix.new_empty(1, width, dtype=torch.float32)


@dual_cast.register_fake
def _cast_made(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    return matrix.new_empty(height, width, dtype=dtype), matrix.new_empty(width, height, dtype=dtype)


def _squares(matrix: Tensor) -> tuple[int, int]:
    height, width = matrix.shape
    return -(-height // SIDE), -(-width // SIDE)
