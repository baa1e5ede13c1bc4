"""Triton kernels of softmax and cross-entropy over rows of logits. Needs Triton.

One program computes one row in fp32, in a loop over blocks of the vocabulary. Rows are apart by a stride in 64 bits,
because all logits are more than 2^31 numbers.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def row_statistics_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    logits: tl.tensor,
    target: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    absent: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Online softmax: maximum and sum of exponentials relative to it; the target's logit, or `absent`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    maximum = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        before = maximum
        maximum = tl.maximum(before, tl.max(x, 0))
        # Of logits that are all -inf so far, the sum is 0 and not NaN.
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        sums = sums * tl.exp(before - shift) + tl.exp(x - shift)
    tl.store(largest + row, maximum)
    tl.store(total + row, tl.sum(sums, 0))
    place = tl.load(target + row) - first
    here = (place >= 0) & (place < columns)
    tl.store(chosen + row, tl.load(logits + place, mask=here, other=absent).to(tl.float32))


@triton.jit
def logits_gradient_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    logits: tl.tensor,
    gradient: tl.tensor,
    log_z: tl.tensor,
    labels: tl.tensor,
    factor: tl.tensor,
    stride: tl.tensor,
    gradient_stride: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    z_loss: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Gradient of cross-entropy plus z-loss times `factor`, in another tensor or over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * gradient_stride
    normalizer, scale = tl.load(log_z + row), tl.load(factor + row)
    slope = 1 + 2 * z_loss * normalizer
    place = tl.load(labels + row) - first
    for start in range(0, columns, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        change = (tl.exp(x - normalizer) * slope - (column == place).to(tl.float32)) * scale
        tl.store(gradient + column, rounded(change, gradient.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
