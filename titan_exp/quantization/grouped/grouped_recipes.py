"""Recipes of emulated grouped matmuls: each expert's rows and weight are rounded as those of one linear layer.

Scales of a whole matrix, or of a column of tokens, are per expert. Nothing synchronizes with the host.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from titan_exp.ops.moe.permutation import TokenPadding, experts_of_rows
from titan_exp.quantization.float8.float8_linear import Float8
from titan_exp.quantization.float8.float8_tensor import E4M3, AmaxReduce, cast, scale_of
from titan_exp.quantization.mx.hadamard import transformed
from titan_exp.quantization.mx.mxfp8_linear import BLOCK as MX_BLOCK
from titan_exp.quantization.mx.mxfp8_linear import rounded as rounded_mx
from titan_exp.quantization.mx.nvfp4_linear import NVFP4
from titan_exp.quantization.mx.nvfp4_tensor import BLOCK as NVFP4_BLOCK
from titan_exp.quantization.mx.nvfp4_tensor import rounded as rounded_nvfp4


@dataclass(frozen=True)
class Operands:
    """Rounded matrices for `grouped_rows` or `grouped_outer`."""

    left: Tensor
    """[tokens, k] or [tokens, m]."""
    right: Tensor
    """[experts, k, n] or [tokens, n]."""
    ends: Tensor
    """End of each expert's rows."""
    scales: tuple[Tensor, ...] = ()
    """Factors of the result, applied one after the other."""


class GroupedRecipe(ABC):
    """A recipe for grouped matmuls. Rows after the last end are arbitrary."""

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """The recipe where ranks share the experts' inputs or outputs; `amax_reduce` is the maximum over them."""
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
    """The float8 recipes."""

    recipe: Float8
    """Recipe of a single linear."""

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """Reduce the amax of what spans the ranks' channels."""
        return replace(self, recipe=self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Scales per token and output; or one per expert for its rows and one for its weight."""
        amax_reduce = self.recipe.input_amax_reduce
        right = self._along(weight, 2, amax_reduce) if self.recipe.rowwise else self._whole(weight)
        return Operands(self._tokens(x, E4M3, ends, amax_reduce), right.mT, ends)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Scales per token and input; or one per expert for its rows and one for its weight."""
        whole = not self.recipe.rowwise or self.recipe.high_precision_weight_gradient
        amax_reduce = self.recipe.output_amax_reduce
        right = self._whole(weight) if whole else self._along(weight, 1, amax_reduce)
        return Operands(self._tokens(gradient, self.recipe.gradient_type, ends, amax_reduce), right, ends)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Scales per output and input of each expert; or one per expert for its rows; or unquantized."""
        if self.recipe.high_precision_weight_gradient:
            return Operands(gradient, x, ends)
        if not self.recipe.rowwise:
            left = self._tokens(gradient, self.recipe.gradient_type, ends, self.recipe.output_amax_reduce)
            return Operands(left, self._tokens(x, E4M3, ends, self.recipe.input_amax_reduce), ends)
        return Operands(self._columns(gradient, ends), self._columns(x, ends), ends)

    def _tokens(self, rows: Tensor, dtype: torch.dtype, ends: Tensor, amax_reduce: AmaxReduce | None) -> Tensor:
        if self.recipe.rowwise:
            scale = scale_of(rows, dtype, over=1, power_of_two=self.recipe.power_of_two, amax_reduce=amax_reduce)
        else:
            expert = experts_of_rows(ends, rows.shape[0])
            amax = _expert_amax(rows.abs().amax(1), expert, ends.shape[0])
            scale = _of_rows(self.recipe.scale_of_amax(amax, dtype, amax_reduce), expert)[:, None]
        return _dequantized(rows, scale, dtype)

    def _columns(self, rows: Tensor, ends: Tensor) -> Tensor:
        expert = experts_of_rows(ends, rows.shape[0])
        amax = _expert_amax(rows.abs(), expert, ends.shape[0])
        scale = _of_rows(self.recipe.scale_of_amax(amax, E4M3), expert)
        return _dequantized(rows, scale, E4M3)

    def _along(self, weight: Tensor, dim: int, amax_reduce: AmaxReduce | None) -> Tensor:
        scale = scale_of(weight, E4M3, over=dim, power_of_two=self.recipe.power_of_two, amax_reduce=amax_reduce)
        return _dequantized(weight, scale, E4M3)

    def _whole(self, weight: Tensor) -> Tensor:
        amax = weight.abs().amax((1, 2), keepdim=True)
        amax_reduce = self.recipe.input_amax_reduce or self.recipe.output_amax_reduce
        return _dequantized(weight, self.recipe.scale_of_amax(amax, E4M3, amax_reduce), E4M3)


@dataclass(frozen=True)
class GroupedMX(GroupedRecipe):
    """MXFP8. The last block of an expert's rows may have fewer than 32 numbers."""

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of inputs."""
        return Operands(rounded_mx(x), rounded_mx(weight).mT, ends)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of outputs."""
        return Operands(rounded_mx(gradient), rounded_mx(weight.mT.contiguous()).mT, ends)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Blocks of tokens."""
        padding = TokenPadding.of(ends, x.shape[0], MX_BLOCK)
        left, right = (rounded_mx(padding.spread(rows).t().contiguous()).t() for rows in (gradient, x))
        return Operands(left, right, padding.ends)


@dataclass(frozen=True)
class GroupedNVFP4(GroupedRecipe):
    """NVFP4. The last transform of an expert's rows is padded with zeros."""

    recipe: NVFP4
    """Recipe of a single linear."""

    def sharded(self, *, input_sharded: bool, amax_reduce: AmaxReduce) -> Self:
        """Reduce the amax of what spans the ranks' channels."""
        return replace(self, recipe=self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce))

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of inputs; square blocks of weights."""
        return self._rows(x, weight, ends, self.recipe.input_amax_reduce, transposed=True)

    def input_grad(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of outputs; square blocks of weights."""
        amax_reduce, stochastic = self.recipe.output_amax_reduce, self.recipe.stochastic
        return self._rows(gradient, weight, ends, amax_reduce, transposed=False, stochastic=stochastic)

    def weight_grad(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Blocks of Hadamard-transformed tokens."""
        padding = TokenPadding.of(ends, x.shape[0], NVFP4_BLOCK)
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
        block_scales = weight_scale[:, None].expand(experts, outputs // NVFP4_BLOCK).reshape(-1, 1, 1, 1)
        right = rounded_nvfp4(weight.flatten(0, 1), block_scales, square=True).view_as(weight)
        return Operands(
            rounded_nvfp4(rows, scale[:, None, None, None], stochastic=stochastic),
            right.mT if transposed else right,
            ends,
            (scale[:, None], _of_rows(weight_scale, expert)[:, None]),
        )

    def _transformed(
        self, rows: Tensor, padding: TokenPadding, amax_reduce: AmaxReduce | None, *, stochastic: bool = False
    ) -> tuple[Tensor, Tensor]:
        columns = transformed(padding.spread(rows))
        amax = _expert_amax(columns.abs().amax(0), padding.expert, padding.ends.shape[0])
        scale = self.recipe.scale_of_amax(amax, amax_reduce)
        block_scales = _of_rows(scale, padding.expert)[::NVFP4_BLOCK][:, None]
        return rounded_nvfp4(columns, block_scales, stochastic=stochastic).t(), scale[:, None, None]


def _dequantized(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(tensor, scale, dtype).float() / scale


def _expert_amax(sizes: Tensor, expert: Tensor, experts: int) -> Tensor:
    """Maximum over each expert's rows of non-negative values: [tokens, ...] to [experts, ...]."""
    index = expert.view(-1, *[1] * (sizes.dim() - 1)).expand_as(sizes)
    largest = sizes.new_zeros(experts + 1, *sizes.shape[1:])
    return largest.scatter_reduce(0, index, sizes, "amax")[:experts]


def _of_rows(values: Tensor, expert: Tensor) -> Tensor:
    """Value of each row's expert: [experts, ...] to [tokens, ...]; 1 for rows of no expert."""
    return torch.cat([values, values.new_ones(1, *values.shape[1:])]).index_select(0, expert)
