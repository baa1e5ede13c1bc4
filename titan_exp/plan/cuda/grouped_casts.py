"""Fake casts of torchao's grouped matmuls for experts: results as of its kernels, each one launch.

Shapes and strides are those of torchao 0.18; its own fake kernels exist only beside a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Numbers of MXFP8 that share a scale."""
TILE_ROWS, TILE_COLUMNS = 128, 4
"""Multiples to which rows and columns of MXFP8's scales are padded."""
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _kernel(body: Callable[..., Any]) -> Callable[..., Any]:
    """Custom operator, which takes a cast's tensors and ignores its options."""
    operator = torch.library.custom_op(f"titan_exp::{body.__name__}", mutates_args=())(body)
    operator.register_fake(body)
    tensors = body.__code__.co_argcount
    return lambda *args, **_: operator(*args[:tensors])


@_kernel
def fp8_columns_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, inputs, outputs] by columns, column-major."""
    return _by_columns(x), x.new_empty(x.shape[0], 1, x.shape[2], dtype=torch.float32)


@_kernel
def fp8_transposed_rows_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, inputs, outputs] by rows, transposed and column-major."""
    return _by_columns(x.mT), x.new_empty(x.shape[:2], dtype=torch.float32)


@_kernel
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by rows."""
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@_kernel
def fp8_columns_of_groups(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two matrices [rows, columns] by columns of each group of rows, column-major."""
    x_scales, y_scales = (each.new_empty(each.shape[1] * ends.shape[0], dtype=torch.float32) for each in (x, y))
    return _by_columns(x), x_scales, _by_columns(y), y_scales


@_kernel
def mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by blocks of rows, with padded scales."""
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(_tiled(x.shape[0], x.shape[1] // BLOCK), dtype=_E8M0)


@_kernel
def mxfp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by blocks of columns, column-major, with the scales of the transposed matrix."""
    return _by_columns(x), x.new_empty(x.shape[0] // BLOCK, x.shape[1], dtype=_E8M0).mT


@_kernel
def mxfp8_columns_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, outputs, inputs] by blocks of columns, column-major, with padded scales."""
    experts, outputs, inputs = x.shape
    return _by_columns(x), x.new_empty(experts, prod(_tiled(inputs, outputs // BLOCK)), dtype=_E8M0)


@_kernel
def mxfp8_padded_scales_of_experts(scales: Tensor) -> Tensor:
    """Scales [experts, rows, columns] in tiles."""
    experts, rows, columns = scales.shape
    return scales.new_empty(experts, prod(_tiled(rows, columns)))


@_kernel
def mxfp8_padded_scales_of_groups(scales: Tensor, ends: Tensor) -> Tensor:
    """Scales [rows, columns] in tiles of each group of columns."""
    rows, columns = scales.shape
    return scales.new_empty(_tiled(rows, 0)[0], columns + TILE_COLUMNS * ends.shape[0])


def _by_columns(x: Tensor) -> Tensor:
    """fp8 values of matrices, column-major."""
    return x.new_empty(x.mT.shape, dtype=_E4M3).mT


def _tiled(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of MXFP8's scales, padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _quantized_columns(x: Tensor, **_: Any) -> tuple[None, Tensor, None, Tensor]:
    data, scales = mxfp8_columns(x)
    return None, data, None, scales


_IN = {
    "moe_training.fp8_grouped_mm": {
        "triton_fp8_colwise_3d_scale_and_cast": fp8_columns_of_experts,
        "triton_fp8_rowwise_3d_transpose_rhs": fp8_transposed_rows_of_experts,
        "triton_fp8_rowwise_2d_scale_and_cast": fp8_rows,
        "triton_fp8_per_group_colwise_scales_dual": fp8_columns_of_groups,
    },
    "moe_training.mxfp8_grouped_mm": {
        "_SM100_KERNELS_AVAILABLE": True,
        "mxfp8_quantize_2d_1x32_cutedsl": mxfp8_rows,
        "mxfp8_quantize_cuda_3d": mxfp8_columns_of_experts,
        "triton_mx_block_rearrange_per_group_3d": mxfp8_padded_scales_of_experts,
        "triton_mx_block_rearrange_2d_K_groups": mxfp8_padded_scales_of_groups,
    },
    "mx_formats.kernels": {"mxfp8_quantize_cuda": _quantized_columns},
}
"""Replacements in torchao's prototype modules."""


def fake_casts() -> Iterator[tuple[Any, str, Any]]:
    """Replaced attributes of torchao's modules, as far as they are imported."""
    for module, names in _IN.items():
        if (owner := sys.modules.get(f"torchao.prototype.{module}")) is not None:
            yield from ((owner, name, fake) for name, fake in names.items())
