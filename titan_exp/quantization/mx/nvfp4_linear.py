"""Emulated NVFP4 linear: all three matmuls of forward and backward on four-bit numbers (NVIDIA 2025, arXiv:2509.25149).

Weights are rounded in blocks of 16 by 16, so that forward and backward see the same weight; operands of the weight
gradient are Hadamard-transformed along tokens first. Rounds as on Blackwell and multiplies in fp32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.quantization.float8.float8_tensor import AmaxReduce
from titan_exp.quantization.mx.hadamard import transformed
from titan_exp.quantization.mx.nvfp4_tensor import rounded, tensor_scale


@dataclass(frozen=True)
class NVFP4:
    """The NVFP4 recipe with the sharding of a linear."""

    power_of_two: bool
    """Round tensor scales to powers of two."""
    stochastic: bool
    """Round output gradients stochastically."""
    input_amax_reduce: AmaxReduce | None = None
    """Amax reduction if inputs are sharded by tensor parallelism."""
    output_amax_reduce: AmaxReduce | None = None
    """Amax reduction if outputs are sharded."""

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> "NVFP4":
        """The recipe where ranks share inputs or outputs; `amax_reduce` is the maximum over them."""
        if input_sharded:
            return replace(self, input_amax_reduce=amax_reduce)
        return replace(self, output_amax_reduce=amax_reduce)

    def scale_of(self, matrix: Tensor, amax_reduce: AmaxReduce | None) -> Tensor:
        """Scale of a matrix, of which other ranks may hold other parts."""
        return self.scale_of_amax(matrix.abs().amax(), amax_reduce)

    def scale_of_amax(self, amax: Tensor, amax_reduce: AmaxReduce | None = None) -> Tensor:
        """Tensor scale from amax, reduced over ranks if `amax_reduce` is given."""
        return tensor_scale(amax if amax_reduce is None else amax_reduce(amax), power_of_two=self.power_of_two)

    def scale_of_weight(self, weight: Tensor) -> Tensor:
        """Scale of the whole weight."""
        return self.scale_of(weight, self.input_amax_reduce or self.output_amax_reduce)


def nvfp4_linear(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
    """x · weightᵀ, [..., inputs] and [outputs, inputs], emulated; `scale` is the whole weight's if precomputed.

    Tokens and both weight dims are multiples of 16.
    """
    return _NVFP4Linear.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _NVFP4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
        ctx.recipe = recipe
        scale = recipe.scale_of_weight(weight) if scale is None else scale
        ctx.save_for_backward(x, weight, scale)
        left = _quantized(x.reshape(-1, x.shape[-1]), recipe, recipe.input_amax_reduce)
        output = _multiply(left, (rounded(weight, scale, square=True), scale), x.dtype)
        return output.unflatten(0, x.shape[:-1]) if x.dim() != 2 else output

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
            x_grad = x_grad.unflatten(0, gradients[0].shape[:-1]) if gradients[0].dim() != 2 else x_grad
        if needs_weight_grad:
            # Contracts tokens, all of which this rank has; rows or columns are sharded.
            left = _quantized(transformed(gradient), recipe, recipe.output_amax_reduce, stochastic=recipe.stochastic)
            right = _quantized(transformed(x.reshape(-1, x.shape[-1])), recipe, recipe.input_amax_reduce)
            weight_grad = _multiply(left, right, gradient.dtype)
        return x_grad, weight_grad, None, None


def _quantized(
    matrix: Tensor, recipe: NVFP4, amax_reduce: AmaxReduce | None, *, stochastic: bool = False
) -> tuple[Tensor, Tensor]:
    """A matrix in blocks of 16 along its rows, and its scale."""
    scale = recipe.scale_of(matrix, amax_reduce)
    return rounded(matrix, scale, stochastic=stochastic), scale


def _multiply(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left [m, k] · right [n, k]ᵀ; scales are applied one by one because their product may underflow fp32."""
    return in_type(torch.mm(left[0], right[0].t()) * left[1] * right[1], dtype)
