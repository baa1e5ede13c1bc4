"""Dual float8 cast: a matrix in float8 as it is and transposed, with one read for amax and one for the casts.

The two matmuls of a backward pass contract different dims, and float8 instructions need the contracted dim contiguous,
so activations and gradients are needed in both layouts.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

SIDE = 64
"""Rows and columns of the tile of a kernel program."""


@torch.library.custom_op("titan_exp::dual_amax", mutates_args=())
def dual_amax(matrix: Tensor) -> Tensor:
    """Amax of all rows, then of all columns, of a contiguous matrix: [height + width], fp32, on CUDA."""
    if isinstance(matrix, FakeTensor):
        return _empty_amax(matrix)
    from titan_exp.ops.float8.kernels import amax_kernel

    height, width = matrix.shape
    # The bits of non-negative numbers order like integers.
    amax = matrix.new_zeros(height + width, dtype=torch.int32)
    launch: Any = amax_kernel[_grid(matrix)]
    launch(matrix, amax, amax[height:], height, width, side=SIDE)
    return amax.view(torch.float32)


@torch.library.custom_op("titan_exp::dual_cast", mutates_args=())
def dual_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Multiply a contiguous matrix [height, width] by its scales and cast it, as it is and transposed, saturating.

    `row_scales`, fp32 [height, 1], apply to the plain result, `column_scales` [1, width] to the transposed one; a
    scalar given twice applies to both.
    """
    rows, transposed = _empty_cast(matrix, row_scales, column_scales, dtype)
    if isinstance(matrix, FakeTensor):
        return rows, transposed
    from titan_exp.ops.float8.kernels import cast_kernel

    height, width = matrix.shape
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
def _empty_amax(matrix: Tensor) -> Tensor:
    return matrix.new_empty(sum(matrix.shape), dtype=torch.float32)


@dual_cast.register_fake
def _empty_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    return matrix.new_empty(height, width, dtype=dtype), matrix.new_empty(width, height, dtype=dtype)


def _grid(matrix: Tensor) -> tuple[int, int]:
    height, width = matrix.shape
    return -(-height // SIDE), -(-width // SIDE)
