"""Triton kernel of `ops.optim.adamw`, in a separate file because importing it needs Triton.

It is memory-bound, so square roots and quotients are correctly rounded.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def adamw_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
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
    """Update `block` numbers of a parameter; arguments as in `adamw_update`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    change = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if has_factor:
        change *= tl.load(factor)
    mean = tl.load(first + at, mask=inside, other=0.0).to(tl.float32) * beta1 + change * rest1
    square = tl.load(second + at, mask=inside, other=0.0).to(tl.float32) * beta2 + change * change * rest2
    # The update uses the moments before they are rounded for storage.
    root = tl.div_rn(tl.sqrt_rn(square), tl.load(rates + 1)) + eps
    old = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    new = old * keep - tl.div_rn(tl.load(rates) * mean, root)
    tl.store(first + at, rounded(mean, first.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it
    tl.store(second + at, rounded(square, second.dtype.element_ty), mask=inside)
    tl.store(weight + at, rounded(new, weight.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]
    if has_copy:
        tl.store(copy + at, rounded(new, copy.dtype.element_ty), mask=inside)
