"""The Triton kernel behind `ops.adamw`: a file of its own, because importing it takes Triton.

Memory bounds it, so square roots and quotients are the correctly rounded ones.
"""

import triton
import triton.language as tl

from titan_exp.ops.float8.rounding import rounded


@triton.jit
def adamw_kernel(  # noqa: PLR0917  # a launch may name them, a kernel may not
    weight: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    copy: tl.tensor,
    factor: tl.tensor,
    rates: tl.tensor,
    keep: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    has_factor: tl.constexpr,
    has_copy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """`block` numbers of a parameter; arguments as in `ops.adamw.adamw_update`, which calls it."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    change = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if has_factor:
        change *= tl.load(factor)
    mean = tl.load(first + at, mask=inside, other=0.0).to(tl.float32) * beta1 + change * rest1
    square = tl.load(second + at, mask=inside, other=0.0).to(tl.float32) * beta2 + change * change * rest2
    # The update takes the moments before they are rounded to what they are kept in.
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 1)) + eps
    new = tl.load(weight + at, mask=inside, other=0.0) * keep - tl.div_rn(tl.load(rates) * mean, root)
    tl.store(first + at, rounded(mean, first.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # of pointers
    tl.store(second + at, rounded(square, second.dtype.element_ty), mask=inside)
    tl.store(weight + at, new, mask=inside)
    if has_copy:
        tl.store(copy + at, rounded(new, copy.dtype.element_ty), mask=inside)
