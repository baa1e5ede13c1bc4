"""NVFP4, emulated (NVIDIA 2025, arXiv:2509.25149): e2m1 with an e4m3 scale per 16 numbers and an fp32 scale per tensor.

All three matmuls of a linear's forward and backward use four-bit numbers. Weights are rounded in blocks of 16 by 16, so
that forward and backward see the same weight; operands of the weight gradient are first Hadamard-transformed along
tokens. We round as Blackwell does and multiply in fp32. On plain tensors, the arithmetic is bit by bit that of
torchao's `nvfp4_quantize`, which lacks square blocks and stochastic rounding, and turns zeros into NaN.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.quantization.float8 import AmaxReduce, unflatten

BLOCK = 16  # number of elements that share an e4m3 scale, and of tokens in a Hadamard transform
LARGEST = 6.0  # largest e2m1 value; the others are 0, 0.5, 1, 1.5, 2, 3 and 4
E4M3 = torch.finfo(torch.float8_e4m3fn)
SMALLEST_SCALE = 2.0**-120
"""Minimum tensor scale, so that its inverse times that of the smallest block scale is finite in fp32."""
SIGNS: tuple[int, ...] = (1, 1, -1, 1, -1, -1, 1, -1, -1, -1, 1, 1, 1, -1, 1, -1)
"""Signs of the transform, drawn once; they match no row of the Hadamard matrix."""
_NEGATIVE = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)


def tensor_scale(amax: Tensor, *, power_of_two: bool) -> Tensor:
    """fp32 scales from amax values, so that blocks use e4m3's whole range; `power_of_two` rounds up."""
    scale = (amax.float() / (LARGEST * E4M3.max)).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scale
    mantissa, _ = torch.frexp(scale)  # from 0.5 to below 1, exactly; NaN and infinity become NaN
    return torch.where(mantissa == 0.5, scale, scale / mantissa)


def rounded(matrix: Tensor, scale: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
    """Round matrix [rows, columns] / scale to NVFP4: e2m1 times the block's e4m3 scale, exact in fp32. `square` blocks
    are 16 by 16, else 16 numbers of a row; affected dims are multiples of 16. `stochastic` rounds up with the
    probability that keeps the mean, using the device's generator; block scales always round to nearest."""
    rows, columns = matrix.shape
    height = BLOCK if square else 1
    blocks = matrix.float().reshape(rows // height, height, columns // BLOCK, BLOCK)
    block_scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST / scale
    block_scale = block_scale.clamp(E4M3.tiny, E4M3.max).to(torch.float8_e4m3fn).float()
    numbers = (blocks * (1.0 / scale / block_scale)).clamp(-LARGEST, LARGEST)
    size = numbers.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return (numbers.sign() * steps * step * block_scale).reshape(rows, columns)


def transformed(matrix: Tensor) -> Tensor:
    """Apply a randomized Hadamard transform to groups of 16 rows of a matrix [tokens, columns], and transpose:
    [columns, tokens], same dtype. It spreads outliers before rounding, and is orthogonal, so a matmul over transformed
    tokens is unchanged. One fixed sign vector serves all layers, ranks and runs, so there is no state."""
    groups = matrix.t().reshape(-1, BLOCK)
    return torch.mm(groups, transform(matrix.device, matrix.dtype)).view(matrix.shape[1], matrix.shape[0])


def transform(device: torch.device, dtype: torch.dtype) -> Tensor:
    """diag(signs) · H / 4, [16, 16], with H[i, j] = (-1)^popcount(i & j) (Sylvester). It is computed on the device,
    since a copy from the host would synchronize."""
    place = torch.arange(BLOCK, device=device)
    shared = place[:, None] & place
    shared = shared ^ (shared >> 2)
    odd = (shared ^ (shared >> 1)) & 1
    negative = (_NEGATIVE >> place)[:, None] & 1
    return (0.25 - 0.5 * (odd ^ negative)).to(dtype)


@dataclass(frozen=True)
class NVFP4:
    """NVFP4 recipe, with the sharding of a linear."""

    power_of_two: bool
    stochastic: bool  # round output gradients stochastically
    input_amax_reduce: AmaxReduce | None = None  # amax reduction if inputs are sharded by tensor parallelism
    output_amax_reduce: AmaxReduce | None = None  # amax reduction if outputs are sharded

    @staticmethod
    def of(config: QuantizationConfig) -> "NVFP4":
        """Build the recipe that the configuration asks for, for one rank."""
        return NVFP4(power_of_two=config.power_of_two_scales, stochastic=config.stochastic_rounding)

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> "NVFP4":
        """Recipe for ranks that share inputs or outputs; `amax_reduce` takes the maximum over them."""
        return replace(self, **{"input_amax_reduce" if input_sharded else "output_amax_reduce": amax_reduce})

    def scale_of_amax(self, amax: Tensor, amax_reduce: AmaxReduce | None = None) -> Tensor:
        """Tensor scale from amax, reduced over ranks if `amax_reduce` is given."""
        return tensor_scale(amax if amax_reduce is None else amax_reduce(amax), power_of_two=self.power_of_two)

    def scale_of_weight(self, weight: Tensor) -> Tensor:
        """Scale of the whole weight."""
        return self.scale_of_amax(weight.abs().amax(), self.input_amax_reduce or self.output_amax_reduce)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
    """Compute x · weightᵀ, [..., inputs] and [outputs, inputs], emulated; `scale` is the whole weight's, if
    precomputed. Tokens and both weight dims are multiples of 16."""
    return _NVFP4Linear.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _NVFP4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
        ctx.recipe = recipe
        scale = recipe.scale_of_weight(weight) if scale is None else scale
        ctx.save_for_backward(x, weight, scale)
        left = _quantized(x.reshape(-1, x.shape[-1]), recipe, recipe.input_amax_reduce)
        return unflatten(_multiply(left, (rounded(weight, scale, square=True), scale), x.dtype), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: NVFP4 = ctx.recipe
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        x_grad = weight_grad = None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        if needs_x_grad:
            left = _quantized(gradient, recipe, recipe.output_amax_reduce, stochastic=recipe.stochastic)
            x_grad = _multiply(left, (rounded(weight, scale, square=True).t(), scale), gradient.dtype)
            x_grad = unflatten(x_grad, gradients[0])
        if needs_weight_grad:
            # The matmul contracts tokens, and this rank has all of them; rows or columns are sharded.
            left = _quantized(transformed(gradient), recipe, recipe.output_amax_reduce, stochastic=recipe.stochastic)
            right = _quantized(transformed(x.reshape(-1, x.shape[-1])), recipe, recipe.input_amax_reduce)
            weight_grad = _multiply(left, right, gradient.dtype)
        return x_grad, weight_grad, None, None


def _quantized(
    matrix: Tensor, recipe: NVFP4, amax_reduce: AmaxReduce | None, *, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix in blocks of 16 along its rows; returns it with its scale."""
    scale = recipe.scale_of_amax(matrix.abs().amax(), amax_reduce)
    return rounded(matrix, scale, stochastic=stochastic), scale


def _multiply(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Multiply left [m, k] by right [n, k]ᵀ. Scales come one by one, because their product may underflow fp32."""
    return in_type(torch.mm(left[0], right[0].t()) * left[1] * right[1], dtype)
