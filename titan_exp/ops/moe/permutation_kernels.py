"""Triton kernels of `ops.moe.permutation` and `grouped_mm`, in a separate file because importing it needs Triton.

In permutation a program has one token, whose row it reads or writes once. The rows of its choices are anywhere, and no
other program touches them.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def copy_tokens_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    x: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    choices: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Copy `block` columns of a token to the rows of its choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    numbers = tl.load(x + token * width + column, mask=column < width, other=0.0)
    for choice in tl.static_range(choices):  # type: ignore[misc]  # a loop of Triton
        row = tl.load(inverse + token * choices + choice)
        tl.store(rows + row * width + column, numbers, mask=column < width)


@triton.jit
def sum_rows_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    out: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    choices: tl.constexpr,
    weighted: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Sum `block` columns of a token's rows in fp32, in the order of its choices, times their weights if `weighted`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):  # type: ignore[misc]  # a loop of Triton
        row = tl.load(inverse + token * choices + choice)
        numbers = tl.load(rows + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        if weighted:
            numbers *= tl.load(weights + token * choices + choice)
        total += numbers
    dtype: tl.constexpr = out.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    tl.store(out + token * width + column, rounded(total, dtype), mask=column < width)


@triton.jit
def combine_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gradient: tl.tensor,
    inverse: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    rows_grad: tl.tensor,
    weights_grad: tl.tensor,
    width: tl.tensor,
    choices: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Gradients of a token's rows and weights: its gradient times each weight, and its dot product with each row.

    `padded` is a power of two that is at least `choices`.
    """
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, padded)
    chosen = choice < choices
    first = tl.load(inverse + token * choices + choice, mask=chosen, other=0)[:, None] * width
    weight = tl.load(weights + token * choices + choice, mask=chosen, other=0.0)[:, None]
    dtype: tl.constexpr = rows.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    products = tl.zeros((padded, block), tl.float32)
    for start in range(0, width, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        inside = chosen[:, None] & (column < width)[None, :]
        upstream = tl.load(gradient + token * width + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        offsets = first + column[None, :]
        products += upstream * tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(rows_grad + offsets, rounded(upstream * weight, dtype), mask=inside)
    tl.store(weights_grad + token * choices + choice, tl.sum(products, 1), mask=chosen)


@triton.jit
def zero_rows_after_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    out: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    last: tl.tensor,
    programs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Zero this program's share of the `rows` after `ends[last]`."""
    first = tl.load(ends + last).to(tl.int64) + tl.program_id(0)
    for row in range(first, rows, programs):  # type: ignore[arg-type]  # a loop of Triton
        for start in range(0, width, block):  # type: ignore[arg-type]
            column = start + tl.arange(0, block)
            zeros = tl.zeros((block,), out.dtype.element_ty)  # type: ignore[attr-defined]  # pointers have it
            tl.store(out + row * width + column, zeros, mask=column < width)
