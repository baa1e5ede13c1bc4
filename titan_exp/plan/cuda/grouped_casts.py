"""Fake casts of torchao's grouped matmuls for experts: results as of its kernels, each one launch.

Shapes and strides are those of torchao 0.18; its own fake kernels exist only beside a GPU.
"""

import sys
from collections.abc import Callable, Iterator
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
    experts, inputs, outputs = x.shape
    data = torch.empty_strided(x.shape, (inputs * outputs, 1, inputs), dtype=_E4M3, device=x.device)
    return data, x.new_empty(experts, 1, outputs, dtype=torch.float32)


@_kernel
def fp8_transposed_rows_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, inputs, outputs] by rows, transposed and column-major."""
    experts, inputs, outputs = x.shape
    shape, strides = (experts, outputs, inputs), (inputs * outputs, 1, outputs)
    data = torch.empty_strided(shape, strides, dtype=_E4M3, device=x.device)
    return data, x.new_empty(experts, inputs, dtype=torch.float32)


@_kernel
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by rows."""
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@_kernel
def fp8_columns_of_groups(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two matrices [rows, columns] by columns of each group of rows, column-major."""
    found = []
    for matrix in (x, y):
        rows, columns = matrix.shape
        data = torch.empty_strided((rows, columns), (1, rows), dtype=_E4M3, device=matrix.device)
        found += [data, matrix.new_empty(columns * ends.shape[0], dtype=torch.float32)]
    return found[0], found[1], found[2], found[3]


@_kernel
def mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by blocks of rows, with padded scales."""
    scales = _padded(x.shape[0], TILE_ROWS), _padded(x.shape[1] // BLOCK, TILE_COLUMNS)
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(scales, dtype=_E8M0)


@_kernel
def mxfp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] by blocks of columns, column-major, with the scales of the transposed matrix."""
    rows, columns = x.shape
    data = torch.empty_strided((rows, columns), (1, rows), dtype=_E4M3, device=x.device)
    return data, torch.empty_strided((columns, rows // BLOCK), (1, columns), dtype=_E8M0, device=x.device)


@_kernel
def mxfp8_columns_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, outputs, inputs] by blocks of columns, column-major, with padded scales."""
    experts, outputs, inputs = x.shape
    data = torch.empty_strided(x.shape, (outputs * inputs, 1, outputs), dtype=_E4M3, device=x.device)
    scales = _padded(inputs, TILE_ROWS) * _padded(outputs // BLOCK, TILE_COLUMNS)
    return data, x.new_empty(experts, scales, dtype=_E8M0)


@_kernel
def mxfp8_padded_scales_of_experts(scales: Tensor) -> Tensor:
    """Scales [experts, rows, columns] in tiles."""
    experts, rows, columns = scales.shape
    return scales.new_empty(experts, _padded(rows, TILE_ROWS) * _padded(columns, TILE_COLUMNS))


@_kernel
def mxfp8_padded_scales_of_groups(scales: Tensor, ends: Tensor) -> Tensor:
    """Scales [rows, columns] in tiles of each group of columns."""
    rows, columns = scales.shape
    return scales.new_empty(_padded(rows, TILE_ROWS), columns + TILE_COLUMNS * ends.shape[0])


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


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
