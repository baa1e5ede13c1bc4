"""Rounding to fewer bits in Triton kernels, to the nearest with ties to even, as a GPU does.

Triton's interpreter truncates instead; there numbers are rounded in fp32 first.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter, decided when Triton is imported."""


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Cast fp32 numbers to a smaller dtype; none exceeds the largest float8 value."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            x = _nearest(x, 7, 1)
        elif dtype == tl.float8e4nv:
            x = _nearest(x, 3, 127 - 6)
        elif dtype == tl.float8e5:
            x = _nearest(x, 2, 127 - 14)
    return x.to(dtype)  # type: ignore[arg-type]  # a constant of Triton's language is its value


@triton.jit
def _nearest(x: tl.tensor, mantissa: tl.constexpr, least: tl.constexpr) -> tl.tensor:
    """Round fp32 numbers to `mantissa` bits; `least` is the smallest normal exponent, biased by 127.

    Adding a number whose last bit equals the result's makes the adder round.
    """
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, least) + (23 - mantissa)
    large = ((exponent << 23) | 0x400000).to(tl.float32, bitcast=True)
    size = (tl.abs(x) + large) - large
    return (size.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
