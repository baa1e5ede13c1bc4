"""The product of a projection under a recipe, which takes the place of the plain one."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from titan_exp.config.quantization import QuantizationConfig
from titan_exp.models.product import Product
from titan_exp.quantization.float8_product import Float8, float8_product
from titan_exp.quantization.mx_product import mx_product


class Float8Product(Product):
    """A float8 recipe.

    Args:
        recipe: how.
        precomputed: whether the whole weight's scale is computed elsewhere, into `weight_scale`.
    """

    weight_scale: Tensor | None

    def __init__(self, recipe: Float8, *, precomputed: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("weight_scale", torch.ones(()) if precomputed else None, persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ."""
        return float8_product(x, weight, self.weight_scale, self.recipe)

    def divide(self, *, inputs: bool, greatest: Callable[[Tensor], Tensor]) -> None:
        """Scales are those of all ranks' parts together."""
        divided = {"inputs_divided" if inputs else "outputs_divided": greatest}
        self.recipe = replace(self.recipe, **divided)

    def extra_repr(self) -> str:
        """The recipe, where the model is printed."""
        return str(self.recipe)


class MXProduct(Product):
    """MXFP8. Blocks lie within what a rank holds, so it does not matter how a projection is divided."""

    def __init__(self, *, emulated: bool) -> None:
        super().__init__()
        self.emulated = emulated

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ."""
        return mx_product(x, weight, emulated=self.emulated)


def product_of(config: QuantizationConfig, *, emulated: bool) -> Product:
    """The product that a recipe makes."""
    if config.recipe == "mxfp8":
        return MXProduct(emulated=emulated)
    recipe = Float8(
        rowwise=config.recipe != "float8_tensorwise",
        high_precision_weight_gradient=config.recipe == "float8_rowwise_gw_hp",
        power_of_two=config.power_of_two_scales,
        emulated=emulated,
        both_ways=config.fused_casts and not emulated,
    )
    return Float8Product(recipe, precomputed=config.precomputed_scales)
