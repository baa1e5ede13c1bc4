"""Float8 numbers with scales, and products of them: torchao's casts and matmuls on plain tensors.

A scale multiplies on the way to float8, as in torchao. torchao's own tensor classes do not go through tensor
parallelism, and its modules quantize what one rank holds, whatever the others have.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_exp.quantization.torchao import addmm_float8_unwrapped, amax_to_scale, to_fp8_saturated

AmaxReduce = Callable[[Tensor], Tensor]
"""The largest of several ranks' values, element by element."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(
    tensor: Tensor, dtype: torch.dtype, *, over: int | None, power_of_two: bool, amax_reduce: AmaxReduce | None = None
) -> Tensor:
    """Scales that bring the largest absolute values of a matrix to that of a type, fp32.

    Args:
        tensor: [rows, columns].
        dtype: the float8 type.
        over: the dim whose numbers share a scale, which is 1 long in the result; None for one scale, a scalar.
        power_of_two: round down to a power of two.
        amax_reduce: where other ranks have other numbers that share these scales.
    """
    amax = tensor.abs().amax() if over is None else tensor.abs().amax(over, keepdim=True)
    return scale_of_amax(amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=power_of_two)


def scale_of_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales from largest absolute values."""
    return amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor · scale in float8; what lies beyond is the largest that there is."""
    return to_fp8_saturated(tensor.float() * scale, dtype)


def multiply(
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    dtype: torch.dtype,
    *,
    emulated: bool,
    fast: bool = False,
) -> Tensor:
    """left · right, [m, k] and [k, n], both float8.

    Args:
        left: float8.
        left_scale: a scalar, or [m, 1].
        right: float8.
        right_scale: a scalar, or [1, n].
        dtype: type of the result.
        emulated: multiply in fp32.
        fast: let the tensor cores add up in fewer bits, which is faster on Hopper.
    """
    if emulated:
        return in_type(torch.mm(left.float() / left_scale, right.float() / right_scale), dtype)
    if left_scale.dim() == 0 and right_scale.dim() > 0:
        left_scale = left_scale.expand(left.shape[0], 1).contiguous()
    if right_scale.dim() == 0 and left_scale.dim() > 0:
        right_scale = right_scale.expand(1, right.shape[1]).contiguous()
    # The instructions want rows of the one and columns of the other to be contiguous.
    columns = right.t().contiguous().t()
    return addmm_float8_unwrapped(left.contiguous(), left_scale, columns, right_scale, dtype, use_fast_accum=fast)


def in_type(product: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in the type of its operands, with which an autograd function ends.

    Where there is nothing to convert it is not converted: torch 2.11's compiler would hand that function a gradient of
    zeros.
    """
    return product if product.dtype == dtype else product.to(dtype)
