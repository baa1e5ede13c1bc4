"""Float8 casts of a matrix and its transpose, of all weights of a model, and of tokens to the rows of their experts.

The two matmuls of a backward pass contract different dims, and float8 instructions need the contracted dim contiguous,
so activations and gradients are needed in both layouts: one read yields the amax of both, and another their casts.
Weights are cast together, by tables of addresses, so the number of launches does not grow with the number of weights. A
token is read once and scaled once for all of its choices, with permutation and padding in the same pass.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.triton_kernels import jit, rounded, runs_kernel, tl

SIDE = 64  # rows and columns of a kernel program's tile
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
EPS = 1e-12  # smallest amax, as in torchao
SCALE_OF_ZEROS = 2.0**48  # scale of zeros: the power of two below LARGEST / EPS
BLOCK = 1024  # columns of a token that a kernel program processes at a time


@torch.library.custom_op("titan_exp::dual_amax", mutates_args=())
def dual_amax(matrix: Tensor) -> Tensor:
    """Amax of all rows, then of all columns, of a contiguous matrix: [height + width], fp32, on CUDA."""
    if isinstance(matrix, FakeTensor):
        return _empty_amax(matrix)
    height, width = matrix.shape
    # The bits of non-negative numbers order like integers.
    amax = matrix.new_zeros(height + width, dtype=torch.int32)
    amax_kernel[_grid(matrix)](matrix, amax, amax[height:], height, width, side=SIDE)
    return amax.view(torch.float32)


@torch.library.custom_op("titan_exp::dual_cast", mutates_args=())
def dual_cast(matrix: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Multiply a contiguous matrix [height, width] by its scales and cast it, as it is and transposed, saturating.
    `row_scales`, fp32 [height, 1], apply to the plain result, `column_scales` [1, width] to the transposed one; a
    scalar given twice applies to both."""
    rows, transposed = _empty_cast(matrix, row_scales, column_scales, dtype)
    if isinstance(matrix, FakeTensor):
        return rows, transposed
    height, width = matrix.shape
    tensors, largest = (matrix, row_scales, column_scales, rows, transposed), torch.finfo(dtype).max
    cast_kernel[_grid(matrix)](*tensors, height, width, largest, per_tensor=row_scales.dim() == 0, side=SIDE)
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


def weights_amax(weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Amax of rows [height, 1] and of columns [1, width] of contiguous matrices of one dtype, in fp32, on CUDA."""
    sizes = [size for weight in weights for size in weight.shape]
    # The bits of non-negative numbers order like integers.
    bits = weights[0].new_zeros(sum(sizes), dtype=torch.int32)
    parts = bits.view(torch.float32).split(sizes)
    rows, columns = parts[::2], parts[1::2]
    if isinstance(bits, FakeTensor):
        # Fake tensors have no values; the planner sees the bytes that the kernel reads.
        torch._foreach_norm(list(weights), torch.inf)
    else:
        _launch(weights_amax_kernel, [weights, rows, columns], source=weights[0])
    return [(row[:, None], column[None, :]) for row, column in zip(rows, columns, strict=True)]


def cast_weights(
    weights: Sequence[Tensor],
    row_scales: Sequence[Tensor],
    column_scales: Sequence[Tensor],
    rows: Sequence[Tensor],
    transposed: Sequence[Tensor],
    *,
    dtype: torch.dtype,
) -> None:
    """Round contiguous matrices of one dtype to `dtype`, scale and cast them to float8, into `rows` and `transposed`.
    Scales are fp32: one per row or column, or scalars, the same way for all matrices. CUDA only."""
    if isinstance(weights[0], FakeTensor):
        # As above; the kernel reads the weights once and writes both layouts.
        torch._foreach_copy_(list(rows), list(weights))
        torch._foreach_zero_(list(transposed))
        return
    _launch(
        cast_weights_kernel,
        [weights, row_scales, column_scales, rows, transposed],
        source=weights[0],
        target=rows[0],
        largest=torch.finfo(rows[0].dtype).max,
        to_bf16=dtype == torch.bfloat16,
        one_row_scale=row_scales[0].dim() == 0,
        one_column_scale=column_scales[0].dim() == 0,
    )


def _launch(kernel: Any, tensors: Sequence[Sequence[Tensor]], **arguments: Any) -> None:
    """Launch a kernel over the tiles of the first of `tensors`, given the addresses of all."""
    weights = tensors[0]
    assert all(weight.is_contiguous() and weight.dtype == weights[0].dtype for weight in weights), "alike and dense"
    assert all(size % 16 == 0 for weight in weights for size in weight.shape), "checked by the rules"
    addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in tensors)
    starts, table, programs = _table(addresses, tuple(tuple(weight.shape) for weight in weights), weights[0].device)
    kernel[(programs,)](starts, table, **arguments, weights=len(starts), side=SIDE)


@lru_cache(maxsize=8)
def _table(
    addresses: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Tables for a launch: the first tile of each matrix, padded to a power of two; addresses and shapes by matrix; the
    number of tiles. It is cached, because weights stay in place and a copy to the device could wait for the device."""
    starts = [0]
    for height, width in shapes:
        starts.append(starts[-1] + -(-height // SIDE) * -(-width // SIDE))
    programs = starts.pop()
    starts += [programs] * ((1 << (len(shapes) - 1).bit_length()) - len(shapes))
    rows = [[*found, *shape] for *found, shape in zip(*addresses, shapes, strict=True)]
    return torch.tensor(starts, device=device), torch.tensor(rows, device=device), programs


@torch.library.custom_op("titan_exp::cast_tokens", mutates_args=())
def cast_tokens(x: Tensor, inverse: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Cast `x` [tokens, dim] to e4m3 in the rows of a `PaddedOrder`; returns rows and their fp32 scales, powers of two.
    For finite tokens, the bits equal those of torchao's rowwise cast of the permuted and padded tokens."""
    rows, scales = _empty_rows(x, inverse, padding)
    # These are the bits of zeros.
    rows.view(torch.uint8).index_fill_(0, padding, 0)
    scales.index_fill_(0, padding, SCALE_OF_ZEROS)
    if runs_kernel(x):
        if not isinstance(x, FakeTensor) and x.numel():
            sizes = {"choices": inverse.shape[1], "block": BLOCK}
            tensors = x.contiguous(), inverse.contiguous(), rows, scales
            cast_tokens_kernel[(x.shape[0],)](*tensors, x.shape[1], EPS, LARGEST, **sizes)
        return rows, scales
    amax = x.abs().amax(1).double().clamp(min=EPS)
    scale = (LARGEST / amax).float().log2().floor().exp2()
    cast = (x.float() * scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    for choice in inverse.unbind(1):
        rows.view(torch.uint8).index_copy_(0, choice, cast.view(torch.uint8))
        scales.index_copy_(0, choice, scale)
    return rows, scales


@cast_tokens.register_fake
def _empty_rows(x: Tensor, inverse: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    room = inverse.numel() + padding.shape[0]
    return x.new_empty(room, x.shape[1], dtype=E4M3), x.new_empty(room, dtype=torch.float32)


@jit
def amax_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    side: tl.constexpr,
) -> None:
    """Amax of a tile's rows and columns, as bits of fp32, because their integers order like nonnegative floats."""
    row, column = _indices(tl.program_id(0), tl.program_id(1), side)
    _reduce_tile(matrix, row_amax, column_amax, row, column, height, width)


@jit
def weights_amax_kernel(
    starts: tl.tensor, table: tl.tensor, source: tl.tensor, weights: tl.constexpr, side: tl.constexpr
) -> None:
    """Run `amax_kernel` on a tile of one of many matrices of `source`'s dtype. A row of `table` has the addresses of
    matrix and results, height and width; `starts` has the number of each matrix's first tile."""
    entry, tile = _weight_of(starts, table, 5, weights)
    height, width = tl.load(entry + 3), tl.multiple_of(tl.load(entry + 4), 16)
    across = tl.cdiv(width, side)
    row, column = _indices(tile // across, tile % across, side)
    matrix = _pointer(entry, source.dtype)
    rows = _pointer(entry + 1, tl.pointer_type(tl.int32))
    columns = _pointer(entry + 2, tl.pointer_type(tl.int32))
    _reduce_tile(matrix, rows, columns, row, column, height, width)


@jit
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
    row, column = _indices(tl.program_id(0), tl.program_id(1), side)
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


@jit
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
    """Run `cast_kernel` on a tile of one of many matrices, rounding to bf16 first with `to_bf16`. A row of `table` has
    the addresses of matrix, of row and column scales, and of both results in `target`'s dtype, then height and
    width."""
    entry, tile = _weight_of(starts, table, 7, weights)
    height, width = tl.multiple_of(tl.load(entry + 5), 16), tl.multiple_of(tl.load(entry + 6), 16)
    across = tl.cdiv(width, side)
    row, column = _indices(tile // across, tile % across, side)
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


@jit
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
    """Scale and cast a token to the rows of its choices, and store its scale for each: the largest power of two up to
    largest / amax, where amax is at least `least`."""
    token = tl.program_id(0).to(tl.int64)
    sizes = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        size = tl.abs(tl.load(x + token * width + column, mask=column < width, other=0.0).to(tl.float32))
        sizes = tl.maximum(sizes, size)
    # In fp64, a quotient that is a power of two comes out as one. Clearing the mantissa rounds others down to one.
    quotient = (largest / tl.maximum(tl.max(sizes, 0), least).to(tl.float64)).to(tl.float32)
    scale = (quotient.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        numbers = tl.load(x + token * width + column, mask=column < width, other=0.0).to(tl.float32)
        cast = rounded(_within(numbers * scale, largest), rows.dtype.element_ty)
        for choice in tl.static_range(choices):
            row = tl.load(inverse + token * choices + choice)
            tl.store(rows + row * width + column, cast, mask=column < width)
    for choice in tl.static_range(choices):
        tl.store(scales + tl.load(inverse + token * choices + choice), scale)


@jit
def _weight_of(
    starts: tl.tensor, table: tl.tensor, columns: tl.constexpr, weights: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor]":
    """Table row of this program's matrix, and the number of the program's tile in it."""
    program = tl.program_id(0)
    number = tl.sum((tl.load(starts + tl.arange(0, weights)) <= program).to(tl.int32), 0) - 1
    return table + number * columns, program - tl.load(starts + number)


@jit
def _pointer(entry: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Pointer from an address in a table, to memory that torch has aligned to 16 bytes."""
    return tl.multiple_of(tl.load(entry), 16).to(kind)


@jit
def _indices(down: tl.tensor, across: tl.tensor, side: tl.constexpr) -> "tuple[tl.tensor, tl.tensor]":
    return down * side + tl.arange(0, side), across * side + tl.arange(0, side)


@jit
def _tile(row: tl.tensor, column: tl.tensor, height: tl.tensor, width: tl.tensor) -> "tuple[tl.tensor, tl.tensor]":
    offsets = row.to(tl.int64)[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]


@jit
def _reduce_tile(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    matrix: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
) -> None:
    offsets, mask = _tile(row, column, height, width)
    size = tl.abs(tl.load(matrix + offsets, mask=mask, other=0.0).to(tl.float32))
    # Relaxed order suffices, since a maximum needs no order among programs; the default would add memory barriers.
    of_rows, of_columns = tl.max(size, 1).to(tl.int32, bitcast=True), tl.max(size, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(row_amax + row, of_rows, mask=row < height, sem="relaxed")
    tl.atomic_max(column_amax + column, of_columns, mask=column < width, sem="relaxed")


@jit
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
    offsets, mask = _tile(row, column, height, width)
    tl.store(rows + offsets, rounded(by_row, rows.dtype.element_ty), mask=mask)  # type: ignore[attr-defined]  # pointers have it
    transposed_at = column.to(tl.int64)[:, None] * height + row[None, :]
    mask = (column < width)[:, None] & (row < height)[None, :]
    tl.store(transposed + transposed_at, tl.trans(rounded(by_column, transposed.dtype.element_ty)), mask=mask)  # type: ignore[attr-defined]  # pointers have it


@jit
def _within(numbers: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Saturate at the dtype's largest value; NaN stays NaN."""
    numbers = tl.where(numbers > largest, largest, numbers)
    return tl.where(numbers < -largest, -largest, numbers)
