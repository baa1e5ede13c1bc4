"""Float8 casts, scales and matmuls: torchao's arithmetic, on plain tensors.

A tensor is multiplied by its scale before the cast, as in torchao. torchao's tensor subclasses do not support our
tensor parallelism, and its modules compute scales from one rank's shard.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from titan_exp.ops.autograd import in_type
from titan_exp.quantization.torchao import amax_to_scale, to_fp8_saturated

AmaxReduce = Callable[[Tensor], Tensor]
"""Elementwise maximum over ranks."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Float8Matrix(NamedTuple):
    """A matrix in float8 with its scales. `t()` transposes it without a copy."""

    data: Tensor
    """Float8 numbers."""
    scale: Tensor
    """Factors applied before the cast: a scalar, one per row [rows, 1], or one per column [1, columns]."""
    inverse: Tensor
    """1 / scale, which float8 instructions read."""

    @staticmethod
    def of(data: Tensor, scale: Tensor) -> "Float8Matrix":
        """A matrix cast with these scales."""
        return Float8Matrix(data, scale, scale.reciprocal())

    def t(self) -> "Float8Matrix":
        """The transposed matrix."""
        return Float8Matrix(self.data.t(), self.scale.t(), self.inverse.t())


def amax_of(tensor: Tensor, over: int | None) -> Tensor:
    """Largest magnitude of a matrix, or of each of its rows or columns: `over` is the dim reduced, kept with size 1.

    A norm reads the matrix once in eager mode too. Inductor fuses reductions of rows into the kernel that computes the
    matrix, and not a reduction of the whole.
    """
    if over is not None:
        return torch.linalg.vector_norm(tensor, torch.inf, dim=over, keepdim=True)
    return torch.linalg.vector_norm(tensor, torch.inf, dim=-1).amax()


def scale_of(
    tensor: Tensor, dtype: torch.dtype, *, over: int | None, power_of_two: bool, amax_reduce: AmaxReduce | None = None
) -> Tensor:
    """fp32 scales that map the amax of a matrix [rows, columns] to the largest value of a float8 dtype.

    `over` is the dim whose numbers share a scale, kept with size 1; None gives one scalar scale. `power_of_two` rounds
    down. `amax_reduce` covers ranks whose numbers share these scales.
    """
    amax = amax_of(tensor, over)
    return scale_of_amax(amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=power_of_two)


def scale_of_amax(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales from amax values."""
    return amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_two)


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor · scale in float8, saturating."""
    return to_fp8_saturated(tensor.float() * scale, dtype)


def multiply(
    left: Float8Matrix, right: Float8Matrix, dtype: torch.dtype, *, emulated: bool, fast: bool = False
) -> Tensor:
    """left [m, k] · right [k, n] in `dtype`; scales are scalars, or [m, 1] and [1, n].

    `fast` accumulates in fewer bits, which is faster on Hopper. Rowwise scales are applied by the matmul itself
    (cuBLAS 12.9 on Hopper), also without `fast`, where torchao multiplies the output by them in passes of its own.
    """
    if emulated:
        return in_type(torch.mm(left.data.float() / left.scale, right.data.float() / right.scale), dtype)
    left_inverse, right_inverse = left.inverse, right.inverse
    if left_inverse.dim() == 0 and right_inverse.dim() > 0:
        left_inverse = left_inverse.expand(left.data.shape[0], 1).contiguous()
    if right_inverse.dim() == 0 and left_inverse.dim() > 0:
        right_inverse = right_inverse.expand(1, right.data.shape[1]).contiguous()
    if left_inverse.dim() > 0:
        # Transposed column scales have another stride in a dim of size 1, which torch refuses.
        left_inverse = left_inverse.flatten()[:, None]
    # Float8 instructions require row-major left and column-major right matrices; rowwise scales, a result in bf16.
    out = torch._scaled_mm(
        left.data.contiguous(),
        right.data.t().contiguous().t(),
        scale_a=left_inverse,
        scale_b=right_inverse,
        out_dtype=torch.bfloat16 if left_inverse.dim() > 0 else dtype,
        use_fast_accum=fast,
    )
    return in_type(out, dtype)
