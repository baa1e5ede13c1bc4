"""Triton kernels of float8 scaling: amax of rows and columns, and the cast with its transpose. Needs Triton."""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def amax_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    side: tl.constexpr,
) -> None:
    """Amax of rows and columns of a tile, as bits of fp32, whose integers order like nonnegative floats."""
    row, column = _indices(tl.program_id(0), tl.program_id(1), side)  # type: ignore[misc]  # returns a tuple in a kernel
    _reduce_tile(matrix, row_amax, column_amax, row, column, height, width)


@triton.jit
def weights_amax_kernel(
    starts: tl.tensor, table: tl.tensor, source: tl.tensor, weights: tl.constexpr, side: tl.constexpr
) -> None:
    """`amax_kernel` for a tile of one of many matrices of `source`'s dtype: a row of `table` has the addresses of
    matrix and results, height and width; `starts` the number of the first tile of each."""
    entry, tile = _weight_of(starts, table, 5, weights)  # type: ignore[misc]
    height, width = tl.load(entry + 3), tl.multiple_of(tl.load(entry + 4), 16)
    across = tl.cdiv(width, side)
    row, column = _indices(tile // across, tile % across, side)  # type: ignore[misc]
    matrix = _pointer(entry, source.dtype)
    _reduce_tile(
        matrix,
        _pointer(entry + 1, tl.pointer_type(tl.int32)),
        _pointer(entry + 2, tl.pointer_type(tl.int32)),
        row,
        column,
        height,
        width,
    )


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
    per_tensor: tl.constexpr,
    side: tl.constexpr,
) -> None:
    """Scale and cast a tile to both layouts; `per_tensor` means one scale for all."""
    row, column = _indices(tl.program_id(0), tl.program_id(1), side)  # type: ignore[misc]
    offsets, mask = _tile(row, column, height, width)
    numbers = tl.load(matrix + offsets, mask=mask, other=0.0).to(tl.float32)
    _cast_tile(
        numbers,
        row_scales,
        column_scales,
        rows,
        transposed,
        row,
        column,
        height,
        width,
        largest,
        per_tensor,
        per_tensor,
    )


@triton.jit
def cast_weights_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    starts: tl.tensor,
    table: tl.tensor,
    source: tl.tensor,
    target: tl.tensor,
    largest: tl.tensor,
    weights: tl.constexpr,
    side: tl.constexpr,
    to_bf16: tl.constexpr,
    one_row_scale: tl.constexpr,
    one_column_scale: tl.constexpr,
) -> None:
    """`cast_kernel` for a tile of one of many matrices, first rounded to bf16 with `to_bf16`: a row of `table` has the
    addresses of matrix, scales of rows and of columns, and both results of `target`'s dtype; height and width."""
    entry, tile = _weight_of(starts, table, 7, weights)  # type: ignore[misc]
    height, width = tl.multiple_of(tl.load(entry + 5), 16), tl.multiple_of(tl.load(entry + 6), 16)
    across = tl.cdiv(width, side)
    row, column = _indices(tile // across, tile % across, side)  # type: ignore[misc]
    offsets, mask = _tile(row, column, height, width)
    numbers = tl.load(_pointer(entry, source.dtype) + offsets, mask=mask, other=0.0).to(tl.float32)
    if to_bf16:
        numbers = rounded(numbers, tl.bfloat16).to(tl.float32)
    fp32 = tl.pointer_type(tl.float32)
    _cast_tile(
        numbers,
        _pointer(entry + 1, fp32),
        _pointer(entry + 2, fp32),
        _pointer(entry + 3, target.dtype),
        _pointer(entry + 4, target.dtype),
        row,
        column,
        height,
        width,
        largest,
        one_row_scale,
        one_column_scale,
    )


@triton.jit
def cast_tokens_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    x: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    least: tl.tensor,
    largest: tl.tensor,
    choices: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Scale and cast a token to the rows of its choices, and store its scale for each: the power of two at most
    largest / amax, with an amax of at least `least`."""
    token = tl.program_id(0).to(tl.int64)
    sizes = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        size = tl.abs(tl.load(x + token * width + column, mask=column < width, other=0.0).to(tl.float32))
        sizes = tl.maximum(sizes, size)
    # In fp64, where a quotient that is a power of two comes out as one. Without its mantissa it is the one below.
    quotient = (largest / tl.maximum(tl.max(sizes, 0), least).to(tl.float64)).to(tl.float32)
    scale = (quotient.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    for start in range(0, width, block):  # type: ignore[arg-type]
        column = start + tl.arange(0, block)
        numbers = tl.load(x + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        cast = rounded(_within(numbers * scale, largest), rows.dtype.element_ty)  # type: ignore[attr-defined]  # pointers have it
        for choice in tl.static_range(choices):  # type: ignore[misc]  # a loop of Triton
            row = tl.load(inverse + token * choices + choice)
            tl.store(rows + row * width + column, cast, mask=column < width)
    for choice in tl.static_range(choices):  # type: ignore[misc]
        tl.store(scales + tl.load(inverse + token * choices + choice), scale)


@triton.jit
def _weight_of(
    starts: tl.tensor, table: tl.tensor, columns: tl.constexpr, weights: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor]":
    """Row of the table of this program's matrix, and the number of its tile in there."""
    program = tl.program_id(0)
    number = tl.sum((tl.load(starts + tl.arange(0, weights)) <= program).to(tl.int32), 0) - 1
    return table + number * columns, program - tl.load(starts + number)


@triton.jit
def _pointer(entry: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Address in a table, of memory that torch has aligned to 16 bytes."""
    return tl.multiple_of(tl.load(entry), 16).to(kind)


@triton.jit
def _indices(down: tl.tensor, across: tl.tensor, side: tl.constexpr) -> "tuple[tl.tensor, tl.tensor]":
    return down * side + tl.arange(0, side), across * side + tl.arange(0, side)


@triton.jit
def _tile(row: tl.tensor, column: tl.tensor, height: tl.tensor, width: tl.tensor) -> "tuple[tl.tensor, tl.tensor]":
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]


@triton.jit
def _reduce_tile(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
) -> None:
    offsets, mask = _tile(row, column, height, width)  # type: ignore[misc]
    size = tl.abs(tl.load(matrix + offsets, mask=mask, other=0.0).to(tl.float32))
    # Relaxed: a maximum needs no order among programs, and the default order puts memory barriers around each.
    of_rows, of_columns = tl.max(size, 1).to(tl.int32, bitcast=True), tl.max(size, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(row_amax + row, of_rows, mask=row < height, sem="relaxed")
    tl.atomic_max(column_amax + column, of_columns, mask=column < width, sem="relaxed")


@triton.jit
def _cast_tile(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    numbers: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    transposed: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    largest: tl.tensor,
    one_row_scale: tl.constexpr,
    one_column_scale: tl.constexpr,
) -> None:
    if one_row_scale:
        by_row = numbers * tl.load(row_scales)
    else:
        by_row = numbers * tl.load(row_scales + row, mask=row < height, other=1.0)[:, None]
    if one_column_scale:
        by_column = numbers * tl.load(column_scales)
    else:
        by_column = numbers * tl.load(column_scales + column, mask=column < width, other=1.0)[None, :]
    by_row, by_column = _within(by_row, largest), _within(by_column, largest)
    offsets, mask = _tile(row, column, height, width)  # type: ignore[misc]
    tl.store(rows + offsets, rounded(by_row, rows.dtype.element_ty), mask=mask)  # type: ignore[attr-defined]  # pointers have it
    transposed_at = column.to(tl.int64)[:, None] * height + row[None, :]
    mask = (column < width)[:, None] & (row < height)[None, :]
    tl.store(transposed + transposed_at, tl.trans(rounded(by_column, transposed.dtype.element_ty)), mask=mask)  # type: ignore[attr-defined]


@triton.jit
def _within(numbers: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Saturate at the largest value of the dtype; NaN stays."""
    numbers = tl.where(numbers > largest, largest, numbers)
    return tl.where(numbers < -largest, -largest, numbers)
