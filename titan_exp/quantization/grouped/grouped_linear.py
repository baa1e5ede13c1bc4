"""Quantized grouped linear for experts: torchao's kernels, or emulation.

torchao has kernels for two recipes. Others, and those two elsewhere, are emulated like a single linear layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.models.blocks.linear_impl import GroupedLinearImpl
from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.ops.moe.grouped_mm import grouped_outer, grouped_rows
from titan_exp.ops.moe.permutation import PaddedOrder, TokenPadding
from titan_exp.quantization.float8.float8_linear import Float8
from titan_exp.quantization.grouped.grouped_recipes import (
    GroupedFloat8,
    GroupedMX,
    GroupedNVFP4,
    GroupedRecipe,
    Operands,
)
from titan_exp.quantization.hardware_support import GROUPED_MULTIPLE
from titan_exp.quantization.mx.nvfp4_linear import NVFP4


class EmulatedGroupedLinear(GroupedLinearImpl):
    """A recipe whose operands are rounded and multiplied in high precision."""

    def __init__(self, recipe: GroupedRecipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """x · weight[expert]ᵀ."""
        return _EmulatedGrouped.apply(x, weight, ends, self.recipe)  # type: ignore[return-value]  # a Tensor

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Reduce amax over the ranks with other channels."""
        self.recipe = self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce)

    def extra_repr(self) -> str:
        """Recipe for `print(model)`."""
        return str(self.recipe)


class NativeGroupedLinear(GroupedLinearImpl):
    """`float8_rowwise` or `mxfp8` by torchao's kernels, which compute scales from this rank's channels.

    Scales are powers of two: another one changes only values below 2^-14 of the amax.
    """

    def __init__(self, recipe: str) -> None:
        super().__init__()
        from titan_exp.quantization.grouped.grouped_kernels import KERNELS, OF_TOKENS

        self.recipe = recipe
        self._multiply, self._of_tokens = KERNELS[recipe], OF_TOKENS.get(recipe)
        # Rows after the last end, uninitialized in between, are not read: that is known of rowwise float8.
        self.row_multiple = GROUPED_MULTIPLE[recipe] if recipe == "float8_rowwise" else 1

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """x · weight[expert]ᵀ."""
        if padded:
            return self._multiply(x, weight, ends)
        padding = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE[self.recipe])
        return padding.collect(self._multiply(padding.spread(x), weight, padding.ends))

    def of_tokens(self, tokens: Tensor, weight: Tensor, order: PaddedOrder) -> Tensor:
        """The same for the padded rows of tokens."""
        if self._of_tokens is None:
            return super().of_tokens(tokens, weight, order)
        return self._of_tokens(tokens, weight, order)

    def extra_repr(self) -> str:
        """Recipe for `print(model)`."""
        return self.recipe


def grouped_linear_impl_for(config: QuantizationConfig, *, emulated: bool) -> GroupedLinearImpl:
    """Grouped linear implementation of a recipe."""
    if not emulated:
        return NativeGroupedLinear(config.recipe)
    if config.recipe == "mxfp8":
        return EmulatedGroupedLinear(GroupedMX())
    if config.recipe == "nvfp4":
        recipe4 = NVFP4(power_of_two=config.power_of_two_scales, stochastic=config.stochastic_rounding)
        return EmulatedGroupedLinear(GroupedNVFP4(recipe4))
    recipe8 = Float8(
        rowwise=config.recipe != "float8_tensorwise",
        high_precision_weight_gradient=config.recipe == "float8_rowwise_gw_hp",
        power_of_two=config.power_of_two_scales,
        emulated=True,
    )
    return EmulatedGroupedLinear(GroupedFloat8(recipe8))


class _EmulatedGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, recipe: GroupedRecipe) -> Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x, weight, ends)
        return _rows(recipe.output(x, weight, ends), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: GroupedRecipe = ctx.recipe
        x, weight, ends = ctx.saved_tensors
        gradient, x_grad, weight_grad = gradients[0], None, None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        if needs_x_grad:
            x_grad = _rows(recipe.input_grad(gradient, weight, ends), gradient.dtype)
        if needs_weight_grad:
            operands = recipe.weight_grad(gradient, x, ends)
            out = grouped_outer(operands.left, operands.right, operands.ends)
            weight_grad = _scaled(out, operands, gradient.dtype)
        return x_grad, weight_grad, None, None


def _rows(operands: Operands, dtype: torch.dtype) -> Tensor:
    return _scaled(grouped_rows(operands.left, operands.right, operands.ends), operands, dtype)


def _scaled(out: Tensor, operands: Operands, dtype: torch.dtype) -> Tensor:
    for scale in operands.scales:
        out = out * scale
    return in_type(out, dtype)
