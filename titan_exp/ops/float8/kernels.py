"""Triton kernels of `ops.float8.cast`, in a separate file because importing it needs Triton."""

import triton
import triton.language as tl

from titan_exp.ops.float8.rounding import rounded


@triton.jit
def amax_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    side: tl.constexpr,
) -> None:
    """Amax of rows and columns of a tile, as bits of fp32, which order like the numbers."""
    row, column = _indices(side)  # type: ignore[misc]  # returns a tuple in a kernel
    offsets, mask = _tile(row, column, height, width)
    size = tl.abs(tl.load(matrix + offsets, mask=mask, other=0.0).to(tl.float32))
    tl.atomic_max(row_amax + row, tl.max(size, 1).to(tl.int32, bitcast=True), mask=row < height)
    tl.atomic_max(column_amax + column, tl.max(size, 0).to(tl.int32, bitcast=True), mask=column < width)


@triton.jit
def cast_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    transposed: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    largest: tl.tensor,
    whole: tl.constexpr,
    side: tl.constexpr,
) -> None:
    """Scale and cast a tile to both layouts; `whole` means one scale for all."""
    row, column = _indices(side)  # type: ignore[misc]  # returns a tuple in a kernel
    offsets, mask = _tile(row, column, height, width)
    numbers = tl.load(matrix + offsets, mask=mask, other=0.0).to(tl.float32)
    if whole:
        scale = tl.load(row_scales)
        by_row = _within(numbers * scale, largest)
        by_column = by_row
    else:
        by_row = _within(numbers * tl.load(row_scales + row, mask=row < height, other=1.0)[:, None], largest)
        scales = tl.load(column_scales + column, mask=column < width, other=1.0)
        by_column = _within(numbers * scales[None, :], largest)
    tl.store(rows + offsets, rounded(by_row, rows.dtype.element_ty), mask=mask)  # type: ignore[attr-defined]  # pointers have it
    transposed_at = column.to(tl.int64)[:, None] * height + row[None, :]
    mask = (column < width)[:, None] & (row < height)[None, :]
    tl.store(transposed + transposed_at, tl.trans(rounded(by_column, transposed.dtype.element_ty)), mask=mask)  # type: ignore[attr-defined]


@triton.jit
def _indices(side: tl.constexpr) -> "tuple[tl.tensor, tl.tensor]":
    return tl.program_id(0) * side + tl.arange(0, side), tl.program_id(1) * side + tl.arange(0, side)


@triton.jit
def _tile(row: tl.tensor, column: tl.tensor, height: tl.tensor, width: tl.tensor) -> "tuple[tl.tensor, tl.tensor]":
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def _within(numbers: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Saturate at the largest value of the dtype; NaN stays."""
    numbers = tl.where(numbers > largest, largest, numbers)
    return tl.where(numbers < -largest, -largest, numbers)
