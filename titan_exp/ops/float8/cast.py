"""Dual float8 cast: a matrix in float8 as it is and transposed, with one read for amax and one for the casts.

The two matmuls of a backward pass contract different dims, and float8 instructions need the contracted dim contiguous,
so activations and gradients are needed in both layouts.
"""

from typing import Any

import torch
from torch import Tensor

SIDE = 64
"""Rows and columns of the tile of a kernel program."""


@torch.library.custom_op("titan_exp::dual_amax", mutates_args=())
def dual_amax(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Amax of rows, [height, 1], and columns, [1, width], of a contiguous matrix; fp32, on CUDA."""
    from titan_exp.ops.float8.kernels import amax_kernel

    height, width = matrix.shape
    row_amax, column_amax = _empty_amax(matrix)
    launch: Any = amax_kernel[_grid(matrix)]
    # The bits of non-negative numbers order like integers.
    bits = row_amax.zero_().view(torch.int32), column_amax.zero_().view(torch.int32)
    launch(matrix, *bits, height, width, side=SIDE)
    return row_amax, column_amax


@torch.library.custom_op("titan_exp::dual_cast", mutates_args=())
def dual_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Multiply a contiguous matrix [height, width] by its scales and cast it, as it is and transposed, saturating.

    `row_scales`, fp32 [height, 1], apply to the plain result, `column_scales` [1, width] to the transposed one; a
    scalar given twice applies to both.
    """
    from titan_exp.ops.float8.kernels import cast_kernel

    height, width = matrix.shape
    rows, transposed = _empty_cast(matrix, row_scales, column_scales, dtype)
    launch: Any = cast_kernel[_grid(matrix)]
    launch(
        matrix,
        row_scales,
        column_scales,
        rows,
        transposed,
        height,
        width,
        torch.finfo(dtype).max,
        per_tensor=row_scales.dim() == 0,
        side=SIDE,
    )
    return rows, transposed


@dual_amax.register_fake
def _empty_amax(matrix: Tensor) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    fp32 = matrix.new_empty(height, 1, dtype=torch.float32)
    return fp32, matrix.new_empty(1, width, dtype=torch.float32)


@dual_cast.register_fake
def _empty_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    return matrix.new_empty(height, width, dtype=dtype), matrix.new_empty(width, height, dtype=dtype)


def _grid(matrix: Tensor) -> tuple[int, int]:
    height, width = matrix.shape
    return -(-height // SIDE), -(-width // SIDE)
