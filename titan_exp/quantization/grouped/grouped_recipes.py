"""Grouped matmul of experts under each recipe: every expert's rows and weight are rounded as the recipe rounds one
linear layer. The host reads nothing.

A scale of a whole matrix, or of a column of tokens, is one expert's.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_exp.ops.moe.token_padding import TokenPadding, experts_of_rows
from titan_exp.quantization.float8.float8_linear import Float8
from titan_exp.quantization.float8.float8_tensor import E4M3, cast, scale_of, scale_of_amax
from titan_exp.quantization.mx.hadamard import transformed
from titan_exp.quantization.mx.mxfp8_linear import BLOCK as MX_BLOCK
from titan_exp.quantization.mx.mxfp8_linear import rounded as rounded_mx
from titan_exp.quantization.mx.nvfp4_linear import NVFP4
from titan_exp.quantization.mx.nvfp4_tensor import BLOCK as NVFP4_BLOCK
from titan_exp.quantization.mx.nvfp4_tensor import rounded as rounded_nvfp4


@dataclass(frozen=True)
class Operands:
    """Rounded matrices, for `grouped_rows` or `grouped_outer`."""

    left: Tensor
    """[tokens, k], or [tokens, m]."""
    right: Tensor
    """[experts, k, n], or [tokens, n]."""
    ends: Tensor
    """Where the rows of each expert end."""
    scales: tuple[Tensor, ...] = ()
    """What the product is multiplied by, one after the other."""


class GroupedRecipe(ABC):
    """A recipe for the product of experts. Rows from the last end on may hold anything."""

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Operands of x · weight[expert]ᵀ: [tokens, inputs], [experts, outputs, inputs]."""

    @abstractmethod
    def of_input(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Operands of gradient · weight[expert]: [tokens, outputs], [experts, outputs, inputs]."""

    @abstractmethod
    def of_weight(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Operands of gradientᵀ · x per expert: [tokens, outputs], [tokens, inputs]."""


@dataclass(frozen=True)
class GroupedFloat8(GroupedRecipe):
    """The float8 recipes."""

    recipe: Float8
    """As of one projection."""

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Scales of tokens and outputs, or one for each expert's rows and one for its weight."""
        right = self._along(weight, 2) if self.recipe.rowwise else self._whole(weight)
        return Operands(self._tokens(x, E4M3, ends), right.mT, ends)

    def of_input(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Scales of tokens and inputs, or one for each expert's rows and one for its weight."""
        whole = not self.recipe.rowwise or self.recipe.high_precision_weight_gradient
        right = self._whole(weight) if whole else self._along(weight, 1)
        return Operands(self._tokens(gradient, self.recipe.gradient_type, ends), right, ends)

    def of_weight(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Scales of outputs and inputs among each expert's rows, or one for each expert's rows; or nothing rounded."""
        if self.recipe.high_precision_weight_gradient:
            return Operands(gradient, x, ends)
        if not self.recipe.rowwise:
            left = self._tokens(gradient, self.recipe.gradient_type, ends)
            return Operands(left, self._tokens(x, E4M3, ends), ends)
        return Operands(self._columns(gradient, ends), self._columns(x, ends), ends)

    def _tokens(self, rows: Tensor, dtype: torch.dtype, ends: Tensor) -> Tensor:
        if self.recipe.rowwise:
            scale = scale_of(rows, dtype, over=1, power_of_two=self.recipe.power_of_two)
        else:
            expert = experts_of_rows(ends, rows.shape[0])
            amax = _largest(rows.abs().amax(1), expert, ends.shape[0])
            scale = _of_rows(scale_of_amax(amax, dtype, power_of_two=self.recipe.power_of_two), expert)[:, None]
        return _dequantized(rows, scale, dtype)

    def _columns(self, rows: Tensor, ends: Tensor) -> Tensor:
        expert = experts_of_rows(ends, rows.shape[0])
        amax = _largest(rows.abs(), expert, ends.shape[0])
        scale = _of_rows(scale_of_amax(amax, E4M3, power_of_two=self.recipe.power_of_two), expert)
        return _dequantized(rows, scale, E4M3)

    def _along(self, weight: Tensor, dim: int) -> Tensor:
        scale = scale_of(weight, E4M3, over=dim, power_of_two=self.recipe.power_of_two)
        return _dequantized(weight, scale, E4M3)

    def _whole(self, weight: Tensor) -> Tensor:
        amax = weight.abs().amax((1, 2), keepdim=True)
        return _dequantized(weight, scale_of_amax(amax, E4M3, power_of_two=self.recipe.power_of_two), E4M3)


@dataclass(frozen=True)
class GroupedMX(GroupedRecipe):
    """MXFP8. Of an expert's rows that are no multiple of 32 the last block has fewer numbers."""

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of inputs."""
        return Operands(rounded_mx(x), rounded_mx(weight).mT, ends)

    def of_input(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of outputs."""
        return Operands(rounded_mx(gradient), rounded_mx(weight.mT.contiguous()).mT, ends)

    def of_weight(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Blocks of tokens."""
        aligned = TokenPadding.of(ends, x.shape[0], MX_BLOCK)
        left, right = (rounded_mx(aligned.spread(rows).t().contiguous()).t() for rows in (gradient, x))
        return Operands(left, right, aligned.ends)


@dataclass(frozen=True)
class GroupedNVFP4(GroupedRecipe):
    """NVFP4. Of an expert's rows that are no multiple of 16 the last are transformed with zeros."""

    recipe: NVFP4
    """As of one projection."""

    def output(self, x: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of inputs; square ones of weights."""
        return self._rows(x, weight, ends, transposed=True)

    def of_input(self, gradient: Tensor, weight: Tensor, ends: Tensor) -> Operands:
        """Blocks of outputs; square ones of weights."""
        return self._rows(gradient, weight, ends, transposed=False, stochastic=self.recipe.stochastic)

    def of_weight(self, gradient: Tensor, x: Tensor, ends: Tensor) -> Operands:
        """Blocks of transformed tokens."""
        aligned = TokenPadding.of(ends, x.shape[0], NVFP4_BLOCK)
        left, left_scale = self._transformed(gradient, aligned, stochastic=self.recipe.stochastic)
        right, right_scale = self._transformed(x, aligned)
        return Operands(left, right, aligned.ends, (left_scale, right_scale))

    def _rows(
        self, rows: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool, stochastic: bool = False
    ) -> Operands:
        experts, outputs, _ = weight.shape
        expert = experts_of_rows(ends, rows.shape[0])
        scale = _of_rows(self.recipe.scale_of_amax(_largest(rows.abs().amax(1), expert, experts)), expert)
        of_weight = self.recipe.scale_of_amax(weight.abs().amax((1, 2)))
        of_blocks = of_weight[:, None].expand(experts, outputs // NVFP4_BLOCK).reshape(-1, 1, 1, 1)
        right = rounded_nvfp4(weight.flatten(0, 1), of_blocks, square=True).view_as(weight)
        return Operands(
            rounded_nvfp4(rows, scale[:, None, None, None], stochastic=stochastic),
            right.mT if transposed else right,
            ends,
            (scale[:, None], _of_rows(of_weight, expert)[:, None]),
        )

    def _transformed(self, rows: Tensor, aligned: TokenPadding, *, stochastic: bool = False) -> tuple[Tensor, Tensor]:
        columns = transformed(aligned.spread(rows))
        amax = _largest(columns.abs().amax(0), aligned.expert, aligned.ends.shape[0])
        scale = self.recipe.scale_of_amax(amax)
        of_blocks = _of_rows(scale, aligned.expert)[::NVFP4_BLOCK][:, None]
        return rounded_nvfp4(columns, of_blocks, stochastic=stochastic).t(), scale[:, None, None]


def _dequantized(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(tensor, scale, dtype).float() / scale


def _largest(sizes: Tensor, expert: Tensor, experts: int) -> Tensor:
    """The largest of each expert's rows: [tokens, ...] to [experts, ...]; what is not negative."""
    index = expert.view(-1, *[1] * (sizes.dim() - 1)).expand_as(sizes)
    largest = sizes.new_zeros(experts + 1, *sizes.shape[1:])
    return largest.scatter_reduce(0, index, sizes, "amax")[:experts]


def _of_rows(values: Tensor, expert: Tensor) -> Tensor:
    """Values of each row's expert: [experts, ...] to [tokens, ...]; one for rows of no expert."""
    return torch.cat([values, values.new_ones(1, *values.shape[1:])]).index_select(0, expert)
