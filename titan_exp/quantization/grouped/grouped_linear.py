"""The product of experts under a recipe, which takes the place of the plain one.

torchao has kernels for two recipes. Others, and those two elsewhere, are emulated: rounded as the recipe says,
multiplied as the emulated product of one projection is.
"""

from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.ops.moe.grouped_mm import grouped_outer, grouped_rows
from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.quantization.float8.float8_linear import Float8
from titan_exp.quantization.float8.float8_tensor import in_type
from titan_exp.quantization.grouped.grouped_recipes import (
    GroupedFloat8,
    GroupedMX,
    GroupedNVFP4,
    GroupedRecipe,
    Operands,
)
from titan_exp.quantization.mx.nvfp4_linear import NVFP4


class EmulatedGroupedLinear(GroupedLinearImpl):
    """A recipe, rounded as it says, multiplied in high precision.

    Args:
        recipe: what is rounded, and how.
    """

    def __init__(self, recipe: GroupedRecipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x · weight[expert]ᵀ."""
        return _Emulated.apply(x, weight, ends, self.recipe)  # type: ignore[return-value]  # a Tensor

    def extra_repr(self) -> str:
        """The recipe, where the model is printed."""
        return str(self.recipe)


class NativeGroupedLinear(GroupedLinearImpl):
    """`float8_rowwise` or `mxfp8` by torchao's kernels.

    Args:
        recipe: which.
    """

    def __init__(self, recipe: str) -> None:
        super().__init__()
        from titan_exp.quantization.grouped.grouped_kernels import PRODUCTS

        self.recipe = recipe
        self._multiply = PRODUCTS[recipe]

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x · weight[expert]ᵀ."""
        return self._multiply(x, weight, ends)

    def extra_repr(self) -> str:
        """The recipe, where the model is printed."""
        return self.recipe


def grouped_linear_impl_for(config: QuantizationConfig, *, emulated: bool) -> GroupedLinearImpl:
    """The product of experts that a recipe makes."""
    if not emulated:
        return NativeGroupedLinear(config.recipe)
    if config.recipe == "mxfp8":
        return EmulatedGroupedLinear(GroupedMX())
    if config.recipe == "nvfp4":
        four = NVFP4(power_of_two=config.power_of_two_scales, stochastic=config.stochastic_rounding)
        return EmulatedGroupedLinear(GroupedNVFP4(four))
    eight = Float8(
        rowwise=config.recipe != "float8_tensorwise",
        high_precision_weight_gradient=config.recipe == "float8_rowwise_gw_hp",
        power_of_two=config.power_of_two_scales,
        emulated=True,
    )
    return EmulatedGroupedLinear(GroupedFloat8(eight))


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, recipe: GroupedRecipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x, weight, ends)
        return _rows(recipe.output(x, weight, ends), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: GroupedRecipe = ctx.recipe
        x, weight, ends = ctx.saved_tensors
        gradient, of_x, of_weight = gradients[0], None, None
        wants_x, wants_weight = needs_input_grad(ctx)
        if wants_x:
            of_x = _rows(recipe.of_input(gradient, weight, ends), gradient.dtype)
        if wants_weight:
            operands = recipe.of_weight(gradient, x, ends)
            product = grouped_outer(operands.left, operands.right, operands.ends)
            of_weight = _scaled(product, operands, gradient.dtype)
        return of_x, of_weight, None, None


def _rows(operands: Operands, dtype: torch.dtype) -> Tensor:
    return _scaled(grouped_rows(operands.left, operands.right, operands.ends), operands, dtype)


def _scaled(product: Tensor, operands: Operands, dtype: torch.dtype) -> Tensor:
    for scale in operands.scales:
        product = product * scale
    return in_type(product, dtype)
