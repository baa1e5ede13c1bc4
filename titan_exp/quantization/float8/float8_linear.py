"""The three float8 recipes: the products of a projection's forward and backward pass, each from two quantized matrices.

Where ranks hold parts of the dim that a scale is taken over, the largest value of all of them makes the scale: it is
that of the whole matrix, however it is divided.
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
    """A recipe, and how a projection is divided."""

    rowwise: bool
    """A scale for each row of the left and each column of the right matrix, else one for each matrix."""
    high_precision_weight_gradient: bool
    """Compute the weight's gradient from unquantized matrices."""
    power_of_two: bool
    """Scales are powers of two."""
    emulated: bool
    """Multiply in fp32."""
    input_amax_reduce: AmaxReduce | None = None
    """Set where tensor-parallel ranks have different inputs."""
    output_amax_reduce: AmaxReduce | None = None
    """Set where they have different outputs."""
    dual_cast: bool = False
    """Cast what is used as it is and transposed in one pass, by a kernel of ours; the same numbers."""

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
        """A matrix in float8 with the scales of its rows, and with those of its columns, whose memory is transposed;
        with a scale for the whole both are the same numbers.

        Args:
            tensor: [tokens, channels].
            dtype: the float8 type.
            amax_reduce: where other ranks have other channels of the same tokens.
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
    """x · weightᵀ, [..., inputs] and [outputs, inputs].

    Args:
        x: high precision.
        weight: high precision, or quantized before it was gathered.
        scale: the whole weight's, where it is known.
        recipe: how.
    """
    return _Float8Linear.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8) -> Tensor:
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        over = -1 if recipe.rowwise else None
        # A matrix that one scale holds for is divided by tensor parallelism if the dim that is contracted is.
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
        of_x = of_weight = None
        wants_x, wants_weight = needs_input_grad(ctx)
        if recipe.dual_cast and wants_x and wants_weight:
            by_rows, by_columns = recipe.quantize_dual(gradient, recipe.gradient_type, recipe.output_amax_reduce)
        elif not recipe.rowwise:
            by_rows = by_columns = recipe.quantize(gradient, recipe.gradient_type, None, recipe.output_amax_reduce)
        if wants_x:
            of_x = _gradient_of_input(gradient, by_rows, weight, scale, recipe)
            of_x = of_x.unflatten(0, gradients[0].shape[:-1]) if gradients[0].dim() != 2 else of_x
        if wants_weight:
            of_weight = _gradient_of_weight(gradient, by_columns, x.reshape(-1, x.shape[-1]), x_scale, recipe)
        return of_x, of_weight, None, None


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
    """Weight gradient. Contracts tokens, all of which this rank has."""
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
