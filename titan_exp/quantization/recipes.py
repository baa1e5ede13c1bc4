"""The product of a projection under a recipe, which takes the place of the plain one."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from titan_exp.config.groups.quantization import QuantizationConfig
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.quantization.float8.float8_linear import Float8, float8_linear
from titan_exp.quantization.float8.float8_tensor import E4M3, scale_of_amax
from titan_exp.quantization.mx.mxfp8_linear import mxfp8_linear
from titan_exp.quantization.mx.nvfp4_linear import NVFP4, nvfp4_linear


class ScaledLinearImpl(LinearImpl):
    """A recipe with a scale for the whole weight.

    Args:
        precomputed: whether that scale is computed elsewhere, into `weight_scale`.
    """

    weight_scale: Tensor | None

    def __init__(self, *, precomputed: bool) -> None:
        super().__init__()
        self.register_buffer("weight_scale", torch.ones(()) if precomputed else None, persistent=False)

    @abstractmethod
    def scales_of(self, amax: Tensor) -> Tensor:
        """Scales of weights with these largest absolute values, element by element."""


class Float8LinearImpl(ScaledLinearImpl):
    """A float8 recipe.

    Args:
        recipe: how.
        precomputed: see `ScaledLinearImpl`.
    """

    def __init__(self, recipe: Float8, *, precomputed: bool) -> None:
        super().__init__(precomputed=precomputed)
        self.recipe = recipe

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ."""
        return float8_linear(x, weight, self.weight_scale, self.recipe)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Scales are those of all ranks' parts together."""
        sharded = {"input_amax_reduce" if input_sharded else "output_amax_reduce": amax_reduce}
        self.recipe = replace(self.recipe, **sharded)

    def extra_repr(self) -> str:
        """The recipe, where the model is printed."""
        return str(self.recipe)

    def scales_of(self, amax: Tensor) -> Tensor:
        """Scale that maps the amax to the largest e4m3 value."""
        return scale_of_amax(amax, E4M3, power_of_two=self.recipe.power_of_two)


class MXLinearImpl(LinearImpl):
    """MXFP8. Blocks lie within what a rank holds, so it does not matter how a projection is divided."""

    def __init__(self, *, emulated: bool) -> None:
        super().__init__()
        self.emulated = emulated

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ."""
        return mxfp8_linear(x, weight, emulated=self.emulated)


class NVFP4LinearImpl(ScaledLinearImpl):
    """NVFP4. Blocks lie within what a rank holds; the scales of tensors are those of all ranks' parts together.

    Args:
        recipe: how.
        emulated: whether to round as the recipe says and multiply in fp32.
        precomputed: see `ScaledLinearImpl`.
    """

    def __init__(self, recipe: NVFP4, *, emulated: bool, precomputed: bool) -> None:
        super().__init__(precomputed=precomputed)
        self.recipe = recipe
        if emulated:
            self._multiply = nvfp4_linear
        else:
            from titan_exp.quantization.mx.nvfp4_kernels import nvfp4_native

            self._multiply = nvfp4_native

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ."""
        return self._multiply(x, weight, self.weight_scale, self.recipe)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Scales of tensors are those of all ranks' parts together."""
        sharded = {"input_amax_reduce" if input_sharded else "output_amax_reduce": amax_reduce}
        self.recipe = replace(self.recipe, **sharded)

    def extra_repr(self) -> str:
        """The recipe, where the model is printed."""
        return str(self.recipe)

    def scales_of(self, amax: Tensor) -> Tensor:
        """Tensor scale that lets block scales use the whole e4m3 range."""
        return self.recipe.scale_of_amax(amax)


def linear_impl_for(config: QuantizationConfig, *, emulated: bool) -> LinearImpl:
    """The product that a recipe makes."""
    if config.recipe == "mxfp8":
        return MXLinearImpl(emulated=emulated)
    if config.recipe == "nvfp4":
        four = NVFP4(power_of_two=config.power_of_two_scales, stochastic=config.stochastic_rounding)
        return NVFP4LinearImpl(four, emulated=emulated, precomputed=config.precomputed_scales)
    recipe = Float8(
        rowwise=config.recipe != "float8_tensorwise",
        high_precision_weight_gradient=config.recipe == "float8_rowwise_gw_hp",
        power_of_two=config.power_of_two_scales,
        emulated=emulated,
        dual_cast=config.fused_casts and not emulated,
    )
    return Float8LinearImpl(recipe, precomputed=config.precomputed_scales)
