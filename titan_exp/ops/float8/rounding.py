"""Rounding to fewer bits in Triton kernels: a GPU's own instruction, which rounds to the nearest, ties to even.

Triton's interpreter cuts bits off instead; there numbers are rounded in fp32 first, so that nothing is left to cut.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run in the interpreter; decided where Triton is imported."""


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """fp32 numbers in a type of fewer bits, or as they are; none is beyond the largest of a float8 type."""
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
    """fp32 numbers rounded to so many bits behind the first; `least` is the smallest normal exponent, biased by 127.

    Adding a number whose last bit is worth what the result's is makes the adder round.
    """
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, least) + (23 - mantissa)
    large = ((exponent << 23) | 0x400000).to(tl.float32, bitcast=True)
    size = (tl.abs(x) + large) - large
    return (size.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
