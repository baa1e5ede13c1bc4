"""Float8 linear: the matmuls of forward and backward, each of two quantized matrices, under three recipes.

Where ranks hold parts of the dim that shares a scale, amax is reduced over them, so that scales do not depend on the
layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_exp.ops.float8.cast import dual_amax, dual_cast
from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.quantization.float8.float8_tensor import E4M3, E5M2, AmaxReduce, cast, multiply, scale_of, scale_of_amax
from titan_exp.quantization.torchao import Float8TrainingTensor


@dataclass(frozen=True)
class Float8:
    """A float8 recipe with the sharding of a linear."""

    rowwise: bool
    """One scale per row of the left and per column of the right matrix; else one per matrix."""
    high_precision_weight_gradient: bool
    """Compute the weight gradient from unquantized matrices."""
    power_of_two: bool
    """Round scales to powers of two."""
    emulated: bool
    """Multiply in fp32."""
    input_amax_reduce: AmaxReduce | None = None
    """Amax reduction if inputs are sharded by tensor parallelism."""
    output_amax_reduce: AmaxReduce | None = None
    """Amax reduction if outputs are sharded."""
    dual_cast: bool = False
    """Cast matrices needed in both layouts by our dual-cast kernel; the same numbers."""

    @property
    def gradient_type(self) -> torch.dtype:
        """Dtype of output gradients: e5m2's wide range if they share one scale."""
        return E4M3 if self.rowwise else E5M2

    def quantize(
        self, tensor: Tensor, dtype: torch.dtype, over: int | None, amax_reduce: AmaxReduce | None
    ) -> tuple[Tensor, Tensor]:
        """A matrix in float8, and its scales (see `scale_of`)."""
        scale = scale_of(tensor, dtype, over=over, power_of_two=self.power_of_two, amax_reduce=amax_reduce)
        return cast(tensor, scale, dtype), scale

    def quantize_dual(
        self, tensor: Tensor, dtype: torch.dtype, amax_reduce: AmaxReduce | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """A matrix [tokens, channels] in float8 with row scales, and with column scales in transposed memory.

        Both have the same numbers under one scale per matrix. `amax_reduce` covers ranks with other channels of these
        tokens.
        """
        tensor = tensor.contiguous()
        of_rows, of_columns = dual_amax(tensor)
        amax = of_rows if self.rowwise else of_rows.amax()
        scales = scale_of_amax(
            amax if amax_reduce is None else amax_reduce(amax), dtype, power_of_two=self.power_of_two
        )
        columns = scale_of_amax(of_columns, dtype, power_of_two=self.power_of_two) if self.rowwise else scales
        rows, transposed = dual_cast(tensor, scales, columns, dtype)
        return (rows, scales), (transposed.t(), columns)


def float8_linear(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8) -> Tensor:
    """x · weightᵀ, [..., inputs] and [outputs, inputs]; `scale` is the whole weight's if precomputed.

    The weight may already be quantized by a float8 all-gather.
    """
    return _Float8Linear.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8) -> Tensor:
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        over = -1 if recipe.rowwise else None
        # Tensor parallelism shards the scope of an input scale if it shards the contracted dim.
        kept: tuple[Tensor, ...] = (x,)
        if recipe.dual_cast:
            (left, left_scale), kept = recipe.quantize_dual(rows, E4M3, recipe.input_amax_reduce)
        else:
            left, left_scale = recipe.quantize(rows, E4M3, over, recipe.input_amax_reduce)
            kept = kept if recipe.rowwise else (left, left_scale)
        if recipe.rowwise:
            right, right_scale = recipe.quantize(weight, E4M3, -1, recipe.input_amax_reduce)
        else:
            right, right_scale = _whole(weight, scale, recipe)
        ctx.save_for_backward(weight, scale, *kept)
        output = multiply(left, left_scale, right.t(), right_scale.t(), x.dtype, emulated=recipe.emulated, fast=True)
        return output.unflatten(0, x.shape[:-1]) if x.dim() != 2 else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: Float8 = ctx.recipe
        weight, scale, x, *x_scale = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        by_rows = by_columns = None
        x_grad = weight_grad = None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        if recipe.dual_cast and needs_x_grad and needs_weight_grad:
            by_rows, by_columns = recipe.quantize_dual(gradient, recipe.gradient_type, recipe.output_amax_reduce)
        elif not recipe.rowwise:
            by_rows = by_columns = recipe.quantize(gradient, recipe.gradient_type, None, recipe.output_amax_reduce)
        if needs_x_grad:
            x_grad = _gradient_of_input(gradient, by_rows, weight, scale, recipe)
            x_grad = x_grad.unflatten(0, gradients[0].shape[:-1]) if gradients[0].dim() != 2 else x_grad
        if needs_weight_grad:
            weight_grad = _gradient_of_weight(gradient, by_columns, x.reshape(-1, x.shape[-1]), x_scale, recipe)
        return x_grad, weight_grad, None, None


def _gradient_of_input(
    gradient: Tensor, by_rows: tuple[Tensor, Tensor] | None, weight: Tensor, scale: Tensor | None, recipe: Float8
) -> Tensor:
    left, left_scale = by_rows or recipe.quantize(gradient, recipe.gradient_type, -1, recipe.output_amax_reduce)
    if recipe.rowwise and not recipe.high_precision_weight_gradient:
        right, right_scale = recipe.quantize(weight, E4M3, 0, recipe.output_amax_reduce)
    else:
        right, right_scale = _whole(weight, scale, recipe)
    return multiply(left, left_scale, right, right_scale, gradient.dtype, emulated=recipe.emulated)


def _gradient_of_weight(
    gradient: Tensor, by_columns: tuple[Tensor, Tensor] | None, x: Tensor, x_scale: list[Tensor], recipe: Float8
) -> Tensor:
    """Weight gradient; contracts tokens, all of which this rank has."""
    if recipe.high_precision_weight_gradient:
        return torch.mm(gradient.t(), x)
    left, left_scale = by_columns or recipe.quantize(gradient, recipe.gradient_type, 0, None)
    right, right_scale = (x, x_scale[0]) if x_scale else recipe.quantize(x, E4M3, 0, None)
    return multiply(left.t(), left_scale.t(), right, right_scale, gradient.dtype, emulated=recipe.emulated)


def _whole(weight: Tensor, scale: Tensor | None, recipe: Float8) -> tuple[Tensor, Tensor]:
    """The weight under one scale."""
    if isinstance(weight, Float8TrainingTensor):
        return weight._data, weight._scale
    if scale is not None:
        return cast(weight, scale, E4M3), scale
    return recipe.quantize(weight, E4M3, None, recipe.input_amax_reduce or recipe.output_amax_reduce)
