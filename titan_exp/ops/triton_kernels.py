"""Triton kernels: the language, if it is installed, rounding in it, and the choice between kernels and torch.

Kernels are defined beside the operators that launch them. Without Triton, for example with torch for CPUs, they are
never launched.
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.devices import has_triton

if TYPE_CHECKING or importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton import knobs

    INTERPRETED = tl.constexpr(knobs.runtime.interpret)
    """True if kernels run in Triton's interpreter, decided when Triton is imported."""
else:
    triton, tl = None, SimpleNamespace(tensor=Any, constexpr=Any)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that fp32 arithmetic serves


def jit(function: Callable[..., Any]) -> Any:
    """Make a Triton kernel, or a function that kernels call; without Triton, return the function itself."""
    # A type check around it, as in tests, would hide its globals.
    return function if triton is None else triton.jit(inspect.unwrap(function))


def runs_kernel(tensor: torch.Tensor) -> bool:
    """True if a Triton kernel computes on `tensor`: on CUDA and uncompiled, since the compiler fuses torch's operators.
    Fake tensors stand for a GPU's tensors, whose torch includes Triton."""
    if torch.compiler.is_compiling() or not tensor.is_cuda or tensor.dtype not in DTYPES:
        return False
    # Subclasses such as DTensor have operators of their own.
    return type(tensor) is FakeTensor or (type(tensor) is torch.Tensor and _has_triton())


_has_triton = cache(has_triton)


@jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Cast fp32 numbers to a smaller dtype, rounding to nearest with ties to even; none may exceed float8's largest
    value. Triton's interpreter truncates instead of rounding, so there we round in fp32 first."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            x = _nearest(x, 7, 1)
        elif dtype == tl.float8e4nv:
            x = _nearest(x, 3, 127 - 6)
        elif dtype == tl.float8e5:
            x = _nearest(x, 2, 127 - 14)
    return x.to(dtype)  # a constant of Triton's language is its value  # type: ignore[arg-type]  # a constant of Triton's language is its value


@jit
def _nearest(x: tl.tensor, mantissa: tl.constexpr, least: tl.constexpr) -> tl.tensor:
    """Round fp32 numbers to `mantissa` bits; `least` is the smallest normal exponent, biased by 127. Adding a number
    whose last bit equals the result's makes the adder round."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum((bits >> 23) & 0xFF, least) + (23 - mantissa)
    large = ((exponent << 23) | 0x400000).to(tl.float32, bitcast=True)
    size = (tl.abs(x) + large) - large
    return (size.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
