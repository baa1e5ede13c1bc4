"""Triton kernels of `ops.moe.expert_bias`, in a separate file because importing it needs Triton."""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def add_expert_bias_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    out: tl.tensor,
    rows: tl.tensor,
    bias: tl.tensor,
    ends: tl.tensor,
    weights: tl.tensor,
    width: tl.tensor,
    experts: tl.constexpr,
    padded: tl.constexpr,
    weighted: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute a row of rows + weight · bias[expert]; `padded` is a power of two that is at least `experts`.

    The added bias is rounded before the sum, as torch rounds it.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, padded)
    before = (tl.load(ends + number, mask=number < experts, other=0) <= row) & (number < experts)
    expert = tl.sum(before.to(tl.int32), 0).to(tl.int64)
    # Rows after those of the last expert get no bias.
    biased = tl.where(expert < experts, width, 0)
    dtype: tl.constexpr = out.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    for start in range(0, width, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        inside = column < width
        numbers = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        added = tl.load(bias + expert * width + column, mask=column < biased, other=0.0).to(tl.float32)
        if weighted:
            added *= tl.load(weights + row)
        numbers += rounded(added, dtype).to(tl.float32)
        tl.store(out + row * width + column, rounded(numbers, dtype), mask=inside)


@triton.jit
def expert_bias_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    bias_grad: tl.tensor,
    gradient: tl.tensor,
    bias: tl.tensor,
    ends: tl.tensor,
    weights: tl.tensor,
    parts: tl.tensor,
    width: tl.tensor,
    height: tl.tensor,
    weighted: tl.constexpr,
    side: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Sum `block` columns of an expert's rows of the gradient, `side` rows at a time.

    If `weighted`, rows count times their weights, of whose gradients these columns' parts are computed too.
    """
    expert, columns = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = columns * block + tl.arange(0, block)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    total = tl.zeros((side, block), tl.float32)
    at = expert.to(tl.int64) * width + column
    if weighted:
        its_bias = tl.load(bias + at, mask=column < width, other=0.0).to(tl.float32)
    for start in range(first, last, side):  # type: ignore[arg-type]  # a loop of Triton
        row = (start + tl.arange(0, side)).to(tl.int64)
        inside = (row < last)[:, None] & (column < width)[None, :]
        upstream = tl.load(gradient + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if weighted:
            tl.store(parts + columns * height + row, tl.sum(upstream * its_bias[None, :], 1), mask=row < last)
            upstream *= tl.load(weights + row, mask=row < last, other=0.0)[:, None]
        total += upstream
    tl.store(bias_grad + at, tl.sum(total, 0), mask=column < width)
