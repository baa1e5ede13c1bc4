"""The three float8 recipes: the products of a projection's forward and backward pass, each from two quantized matrices.

Where ranks hold parts of the dim that a scale is taken over, the largest value of all of them makes the scale: it is
that of the whole matrix, however it is divided.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_exp.quantization.engine import Float8TrainingTensor
from titan_exp.quantization.float8 import E4M3, E5M2, Greatest, cast, multiply, scale_of
from titan_exp.quantization.wanted import wanted_gradients


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
    inputs_divided: Greatest | None = None
    """Set where tensor-parallel ranks have different inputs."""
    outputs_divided: Greatest | None = None
    """Set where they have different outputs."""

    @property
    def gradient_type(self) -> torch.dtype:
        """What gradients of outputs are cast to: a wide range where all of them share a scale."""
        return E4M3 if self.rowwise else E5M2

    def quantize(
        self, tensor: Tensor, dtype: torch.dtype, over: int | None, greatest: Greatest | None
    ) -> tuple[Tensor, Tensor]:
        """A matrix in float8, and its scales (see `scale_of`)."""
        scale = scale_of(tensor, dtype, over=over, power_of_two=self.power_of_two, greatest=greatest)
        return cast(tensor, scale, dtype), scale


def float8_product(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8) -> Tensor:
    """x · weightᵀ, [..., inputs] and [outputs, inputs].

    Args:
        x: high precision.
        weight: high precision, or quantized before it was gathered.
        scale: the whole weight's, where it is known.
        recipe: how.
    """
    return _Float8Product.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: Float8) -> Tensor:
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        over = -1 if recipe.rowwise else None
        # A matrix that one scale holds for is divided by tensor parallelism if the dim that is contracted is.
        left, left_scale = recipe.quantize(rows, E4M3, over, recipe.inputs_divided)
        if recipe.rowwise:
            right, right_scale = recipe.quantize(weight, E4M3, -1, recipe.inputs_divided)
            ctx.save_for_backward(x, weight, scale)
        else:
            right, right_scale = _whole(weight, scale, recipe)
            ctx.save_for_backward(left, weight, scale, left_scale)
        output = multiply(left, left_scale, right.t(), right_scale.t(), x.dtype, emulated=recipe.emulated, fast=True)
        return output.unflatten(0, x.shape[:-1]) if x.dim() != 2 else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: Float8 = ctx.recipe
        x, weight, scale, *x_scale = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        shared = None
        if not recipe.rowwise:
            shared = recipe.quantize(gradient, recipe.gradient_type, None, recipe.outputs_divided)
        of_x = of_weight = None
        wants_x, wants_weight = wanted_gradients(ctx)
        if wants_x:
            of_x = _gradient_of_input(gradient, shared, weight, scale, recipe)
            of_x = of_x.unflatten(0, gradients[0].shape[:-1]) if gradients[0].dim() != 2 else of_x
        if wants_weight:
            of_weight = _gradient_of_weight(gradient, shared, x.reshape(-1, x.shape[-1]), x_scale, recipe)
        return of_x, of_weight, None, None


def _gradient_of_input(
    gradient: Tensor, shared: tuple[Tensor, Tensor] | None, weight: Tensor, scale: Tensor | None, recipe: Float8
) -> Tensor:
    left, left_scale = shared or recipe.quantize(gradient, recipe.gradient_type, -1, recipe.outputs_divided)
    if recipe.rowwise and not recipe.high_precision_weight_gradient:
        right, right_scale = recipe.quantize(weight, E4M3, 0, recipe.outputs_divided)
    else:
        right, right_scale = _whole(weight, scale, recipe)
    return multiply(left, left_scale, right, right_scale, gradient.dtype, emulated=recipe.emulated)


def _gradient_of_weight(
    gradient: Tensor, shared: tuple[Tensor, Tensor] | None, x: Tensor, x_scale: list[Tensor], recipe: Float8
) -> Tensor:
    """What is contracted are tokens, which every rank has all of here."""
    if recipe.high_precision_weight_gradient:
        return torch.mm(gradient.t(), x)
    left, left_scale = shared or recipe.quantize(gradient, recipe.gradient_type, 0, None)
    right, right_scale = (x, x_scale[0]) if x_scale else recipe.quantize(x, E4M3, 0, None)
    return multiply(left.t(), left_scale.t(), right, right_scale, gradient.dtype, emulated=recipe.emulated)


def _whole(weight: Tensor, scale: Tensor | None, recipe: Float8) -> tuple[Tensor, Tensor]:
    """The weight under one scale."""
    if isinstance(weight, Float8TrainingTensor):
        return weight._data, weight._scale
    if scale is not None:
        return cast(weight, scale, E4M3), scale
    return recipe.quantize(weight, E4M3, None, recipe.inputs_divided or recipe.outputs_divided)
