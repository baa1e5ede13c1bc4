"""The Triton kernels behind `ops.float8_cast`: a file of its own, because importing it takes Triton."""

import triton
import triton.language as tl

from titan_exp.ops.float8.rounding import rounded


@triton.jit
def largest_kernel(  # noqa: PLR0917  # a launch may name them, a kernel may not
    matrix: tl.tensor,
    of_rows: tl.tensor,
    of_columns: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    side: tl.constexpr,
) -> None:
    """Largest absolute values of a square of the matrix, into both; as bits of fp32, whose order is that of numbers."""
    row, column = _places(side)  # type: ignore[misc]  # in a kernel it returns
    at, inside = _square(row, column, height, width)
    size = tl.abs(tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(of_rows + row, tl.max(size, 1).to(tl.int32, bitcast=True), mask=row < height)
    tl.atomic_max(of_columns + column, tl.max(size, 0).to(tl.int32, bitcast=True), mask=column < width)


@triton.jit
def cast_kernel(  # noqa: PLR0917  # a launch may name them, a kernel may not
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
    """A square of the matrix, times its scales, to both places; one scale for all where `whole`."""
    row, column = _places(side)  # type: ignore[misc]  # in a kernel it returns
    at, inside = _square(row, column, height, width)
    numbers = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32)
    if whole:
        scale = tl.load(row_scales)
        of_rows = _within(numbers * scale, largest)
        of_columns = of_rows
    else:
        of_rows = _within(numbers * tl.load(row_scales + row, mask=row < height, other=1.0)[:, None], largest)
        scales = tl.load(column_scales + column, mask=column < width, other=1.0)
        of_columns = _within(numbers * scales[None, :], largest)
    tl.store(rows + at, rounded(of_rows, rows.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # of pointers
    turned = column.to(tl.int64)[:, None] * height + row[None, :]
    inside = (column < width)[:, None] & (row < height)[None, :]
    tl.store(transposed + turned, tl.trans(rounded(of_columns, transposed.dtype.element_ty)), mask=inside)  # type: ignore[attr-defined]


@triton.jit
def _places(side: tl.constexpr) -> "tuple[tl.tensor, tl.tensor]":
    return tl.program_id(0) * side + tl.arange(0, side), tl.program_id(1) * side + tl.arange(0, side)


@triton.jit
def _square(row: tl.tensor, column: tl.tensor, height: tl.tensor, width: tl.tensor) -> "tuple[tl.tensor, tl.tensor]":
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    return at, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def _within(numbers: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Cut off at the largest of the type; what is not a number stays none."""
    numbers = tl.where(numbers > largest, largest, numbers)
    return tl.where(numbers < -largest, -largest, numbers)
