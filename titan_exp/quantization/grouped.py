"""Quantized grouped linear for experts: torchao's kernels, or emulation.

torchao has kernels for two recipes. Other recipes, and these two on other devices, are emulated: each expert's rows and
weight are rounded as in a linear layer. Scales of a whole matrix, or of a column of tokens, are per expert. Nothing
synchronizes with the host.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.models.blocks.linear import GroupedLinearImpl
from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.ops.moe.grouped_mm import grouped_outer, grouped_rows
from titan_exp.ops.moe.permutation import PaddedOrder, TokenPadding, experts_of_rows
from titan_exp.quantization import mxfp8, nvfp4
from titan_exp.quantization.float8 import E4M3, AmaxReduce, Float8, cast, scale_of
from titan_exp.quantization.recipes import GROUPED_MULTIPLE


@dataclass(frozen=True)
class Operands:
    """Rounded matrices for `grouped_rows` or `grouped_outer`."""

    left: Tensor  # left matrix, [tokens, k] or [tokens, m]
    right: Tensor  # right matrix, [experts, k, n] or [tokens, n]
    ends: Tensor  # end of each expert's rows
    scales: tuple[Tensor, ...] = ()  # factors of the result, applied one after another


class GroupedRecipe(ABC):
    """Recipe for grouped matmuls. Rows after the last end are arbitrary."""

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """Recipe for ranks that share the experts' inputs or outputs; `amax_reduce` takes the maximum over them."""
        return self

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Operands of x · weight[expert]ᵀ: [tokens, inputs], [experts, outputs, inputs]."""

    @abstractmethod
    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Operands of gradient · weight[expert]: [tokens, outputs], [experts, outputs, inputs]."""

    @abstractmethod
    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Operands of gradientᵀ · x per expert: [tokens, outputs], [tokens, inputs]."""


@dataclass(frozen=True)
class GroupedFloat8(GroupedRecipe):
    """Float8 recipes for grouped matmuls."""

    recipe: Float8  # recipe of a single linear

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """Reduce amax over ranks where values span the ranks' channels."""
        return replace(self, recipe=self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round with scales per token and output, or one per expert for its rows and one for its weight."""
        amax_reduce = self.recipe.input_amax_reduce
        right = self._along(weight, 2, amax_reduce) if self.recipe.rowwise else self._whole(weight)
        return Operands(self._tokens(x, E4M3, ends, amax_reduce), right.mT, ends)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round with scales per token and input, or one per expert for its rows and one for its weight."""
        whole = not self.recipe.rowwise or self.recipe.high_precision_weight_gradient
        amax_reduce = self.recipe.output_amax_reduce
        right = self._whole(weight) if whole else self._along(weight, 1, amax_reduce)
        return Operands(self._tokens(gradient, self.recipe.gradient_type, ends, amax_reduce), right, ends)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Round with scales per output and input of each expert, or one per expert for its rows, or not at all."""
        if self.recipe.high_precision_weight_gradient:
            return Operands(gradient, x, ends)
        if not self.recipe.rowwise:
            left = self._tokens(gradient, self.recipe.gradient_type, ends, self.recipe.output_amax_reduce)
            return Operands(left, self._tokens(x, E4M3, ends, self.recipe.input_amax_reduce), ends)
        return Operands(self._columns(gradient, ends), self._columns(x, ends), ends)

    def _tokens(self, rows: Tensor, dtype: torch.dtype, ends: Tensor, amax_reduce: AmaxReduce | None) -> Tensor:
        if self.recipe.rowwise:
            return self._along(rows, 1, amax_reduce, dtype)
        expert = experts_of_rows(ends, rows.shape[0])
        amax = _expert_amax(rows.abs().amax(1), expert, ends.shape[0])
        return _dequantized(rows, _of_rows(self.recipe.scale_of_amax(amax, dtype, amax_reduce), expert)[:, None], dtype)

    def _columns(self, rows: Tensor, ends: Tensor) -> Tensor:
        expert = experts_of_rows(ends, rows.shape[0])
        amax = _expert_amax(rows.abs(), expert, ends.shape[0])
        return _dequantized(rows, _of_rows(self.recipe.scale_of_amax(amax, E4M3), expert), E4M3)

    def _along(self, tensor: Tensor, dim: int, amax_reduce: AmaxReduce | None, dtype: torch.dtype = E4M3) -> Tensor:
        scale = scale_of(tensor, dtype, over=dim, power_of_two=self.recipe.power_of_two, amax_reduce=amax_reduce)
        return _dequantized(tensor, scale, dtype)

    def _whole(self, weight: Tensor) -> Tensor:
        amax = weight.abs().amax((1, 2), keepdim=True)
        amax_reduce = self.recipe.input_amax_reduce or self.recipe.output_amax_reduce
        return _dequantized(weight, self.recipe.scale_of_amax(amax, E4M3, amax_reduce), E4M3)


@dataclass(frozen=True)
class GroupedMX(GroupedRecipe):
    """MXFP8 for grouped matmuls. An expert's last block of rows may have fewer than 32 numbers."""

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of inputs."""
        return Operands(mxfp8.rounded(x), mxfp8.rounded(weight).mT, ends)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of outputs."""
        return Operands(mxfp8.rounded(gradient), mxfp8.rounded(weight.mT.contiguous()).mT, ends)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of tokens."""
        padding = TokenPadding.of(ends, x.shape[0], mxfp8.BLOCK)
        left, right = (mxfp8.rounded(padding.spread(rows).t().contiguous()).t() for rows in (gradient, x))
        return Operands(left, right, padding.ends)


@dataclass(frozen=True)
class GroupedNVFP4(GroupedRecipe):
    """NVFP4 for grouped matmuls. The last transform of an expert's rows is padded with zeros."""

    recipe: nvfp4.NVFP4  # recipe of a single linear

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """Reduce amax over ranks where values span the ranks' channels."""
        return replace(self, recipe=self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of inputs; weights in square blocks."""
        return self._rows(x, weight, ends, self.recipe.input_amax_reduce, transposed=True)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of outputs; weights in square blocks."""
        amax_reduce, stochastic = self.recipe.output_amax_reduce, self.recipe.stochastic
        return self._rows(gradient, weight, ends, amax_reduce, transposed=False, stochastic=stochastic)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Round in blocks of Hadamard-transformed tokens."""
        padding = TokenPadding.of(ends, x.shape[0], nvfp4.BLOCK)
        left, left_scale = self._transformed(
            gradient, padding, self.recipe.output_amax_reduce, stochastic=self.recipe.stochastic
        )
        right, right_scale = self._transformed(x, padding, self.recipe.input_amax_reduce)
        return Operands(left, right, padding.ends, (left_scale, right_scale))

    def _rows(
        self,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        amax_reduce: AmaxReduce | None,
        *,
        transposed: bool,
        stochastic: bool = False,
    ) -> Operands:
        experts, outputs, _ = weight.shape
        expert = experts_of_rows(ends, rows.shape[0])
        amax = _expert_amax(rows.abs().amax(1), expert, experts)
        scale = _of_rows(self.recipe.scale_of_amax(amax, amax_reduce), expert)
        over_channels = self.recipe.input_amax_reduce or self.recipe.output_amax_reduce
        weight_scale = self.recipe.scale_of_amax(weight.abs().amax((1, 2)), over_channels)
        block_scales = weight_scale[:, None].expand(experts, outputs // nvfp4.BLOCK).reshape(-1, 1, 1, 1)
        right = nvfp4.rounded(weight.flatten(0, 1), block_scales, square=True).view_as(weight)
        return Operands(
            nvfp4.rounded(rows, scale[:, None, None, None], stochastic=stochastic),
            right.mT if transposed else right,
            ends,
            (scale[:, None], _of_rows(weight_scale, expert)[:, None]),
        )

    def _transformed(
        self, rows: Tensor, padding: TokenPadding, amax_reduce: AmaxReduce | None, *, stochastic: bool = False
    ) -> tuple[Tensor, Tensor]:
        columns = nvfp4.transformed(padding.spread(rows))
        amax = _expert_amax(columns.abs().amax(0), padding.expert, padding.ends.shape[0])
        scale = self.recipe.scale_of_amax(amax, amax_reduce)
        block_scales = _of_rows(scale, padding.expert)[:: nvfp4.BLOCK][:, None]
        return nvfp4.rounded(columns, block_scales, stochastic=stochastic).t(), scale[:, None, None]


def _dequantized(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(tensor, scale, dtype).float() / scale


def _expert_amax(sizes: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Maximum over each expert's rows of non-negative values: [tokens, ...] to [experts, ...]."""
    index = expert.view(-1, *[1] * (sizes.dim() - 1)).expand_as(sizes)
    largest = sizes.new_zeros(experts + 1, *sizes.shape[1:])
    return largest.scatter_reduce(0, index, sizes, "amax")[:experts]


def _of_rows(values: Tensor, expert: Tensor) -> Tensor:
    """Value of each row's expert: [experts, ...] to [tokens, ...]; 1 for rows without an expert."""
    return torch.cat([values, values.new_ones(1, *values.shape[1:])]).index_select(0, expert)


class EmulatedGroupedLinear(GroupedLinearImpl):
    """Emulated grouped linear: operands are rounded, then multiplied in high precision."""

    def __init__(self, recipe: GroupedRecipe) -> None:
        super().__init__()
        self.recipe = recipe

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """Compute x · weight[expert]ᵀ."""
        return _EmulatedGrouped.apply(x, weight, ends, self.recipe)  # type: ignore[return-value]  # a Tensor

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Reduce amax over the ranks that hold other channels."""
        self.recipe = self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce)

    def extra_repr(self) -> str:
        """Recipe for `print(model)`."""
        return str(self.recipe)


class NativeGroupedLinear(GroupedLinearImpl):
    """Native grouped linear: `float8_rowwise` or `mxfp8` by torchao's kernels, with scales from this rank's channels
    only. Scales are powers of two, so another scale changes only values below 2^-14 of the amax."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        from titan_exp.quantization.grouped_kernels import KERNELS, OF_TOKENS

        self.recipe = recipe
        self._multiply, self._of_tokens = KERNELS[recipe], OF_TOKENS.get(recipe)
        # Rows after the last end, which are uninitialized in between, are not read; this is known for rowwise float8.
        self.row_multiple = GROUPED_MULTIPLE[recipe] if recipe == "float8_rowwise" else 1

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """Compute x · weight[expert]ᵀ."""
        if padded:
            return self._multiply(x, weight, ends)
        padding = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE[self.recipe])
        return padding.collect(self._multiply(padding.spread(x), weight, padding.ends))

    def of_tokens(self, tokens: Tensor, weight: Tensor, order: PaddedOrder) -> Tensor:
        """Compute the same for the padded rows of tokens."""
        if self._of_tokens is None:
            return super().of_tokens(tokens, weight, order)
        return self._of_tokens(tokens, weight, order)

    def extra_repr(self) -> str:
        """Recipe for `print(model)`."""
        return self.recipe


def grouped_linear_impl_for(config: QuantizationConfig, *, emulated: bool) -> GroupedLinearImpl:
    """Build the grouped linear implementation of a recipe."""
    if not emulated:
        return NativeGroupedLinear(config.recipe)
    if config.recipe == "mxfp8":
        return EmulatedGroupedLinear(GroupedMX())
    if config.recipe == "nvfp4":
        return EmulatedGroupedLinear(GroupedNVFP4(nvfp4.NVFP4.of(config)))
    return EmulatedGroupedLinear(GroupedFloat8(Float8.of(config, emulated=True)))


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
