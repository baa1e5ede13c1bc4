"""Float8 casts, scales and matmuls: torchao's, on plain tensors.

A tensor is multiplied by its scale before the cast, as in torchao. torchao's tensor subclasses do not support our
tensor parallelism, and its modules compute scales from one rank's shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_exp.quantization.torchao import addmm_float8_unwrapped, amax_to_scale, to_fp8_saturated

AmaxReduce = Callable[[Tensor], Tensor]
"""Elementwise maximum over ranks."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_of(
    tensor: Tensor, dtype: torch.dtype, *, over: int | None, power_of_two: bool, amax_reduce: AmaxReduce | None = None
) -> Tensor:
    """fp32 scales that map the amax of a matrix [rows, columns] to the largest value of a float8 dtype.

    `over` is the dim whose numbers share a scale, kept with size 1; None gives one scalar scale. `power_of_two` rounds
    down. `amax_reduce` covers ranks whose numbers share these scales.
    """
    amax = tensor.abs().amax() if over is None else tensor.abs().amax(over, keepdim=True)
    return scale_of_amax(amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=power_of_two)


def scale_of_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales from amax values."""
    return amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor · scale in float8, saturating."""
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
    """left [m, k] · right [k, n], both float8, in `dtype`.

    Scales are scalars, or [m, 1] and [1, n]. `fast` accumulates in fewer bits, which is faster on Hopper.
    """
    if emulated:
        return in_type(torch.mm(left.float() / left_scale, right.float() / right_scale), dtype)
    if left_scale.dim() == 0 and right_scale.dim() > 0:
        left_scale = left_scale.expand(left.shape[0], 1).contiguous()
    if right_scale.dim() == 0 and left_scale.dim() > 0:
        right_scale = right_scale.expand(1, right.shape[1]).contiguous()
    # Float8 instructions require row-major left and column-major right matrices.
    columns = right.t().contiguous().t()
    return addmm_float8_unwrapped(left.contiguous(), left_scale, columns, right_scale, dtype, use_fast_accum=fast)


def in_type(out: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a matmul result at the end of an autograd function.

    Skips a no-op conversion, after which torch 2.11's compiler would pass the function a zero gradient.
    """
    return out if out.dtype == dtype else out.to(dtype)
