"""Quantized implementations of a linear layer, one class per kind of recipe."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.parallelism import QuantizationConfig
from titan_exp.config.torch_features import import_torchao, torchao_violations
from titan_exp.models.blocks.linear import LinearImpl, TensorParallelCollectives
from titan_exp.quantization.float8 import E4M3, Float8, Float8Matrix, Float8Weight, float8_linear
from titan_exp.quantization.mxfp8 import mxfp8_linear
from titan_exp.quantization.nvfp4 import NVFP4, nvfp4_linear


class ScaledLinearImpl(LinearImpl):
    """Recipe with a scale for the whole weight, computed elsewhere into `weight_scale` if `precomputed`."""

    recipe: Any
    weight_scale: Tensor | None

    def __init__(self, recipe: Float8 | NVFP4, *, precomputed: bool) -> None:
        super().__init__()
        self.recipe = recipe
        self.register_buffer("weight_scale", torch.ones(()) if precomputed else None, persistent=False)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Reduce amax over the tensor-parallel ranks."""
        self.recipe = self.recipe.sharded(input_sharded=input_sharded, amax_reduce=amax_reduce)

    def extra_repr(self) -> str:
        """Recipe for `print(model)`."""
        return str(self.recipe)

    @abstractmethod
    def scales_of(self, amax: Tensor) -> Tensor:
        """Scales of weights from their amax, element by element."""


class Float8LinearImpl(ScaledLinearImpl):
    """Float8 recipe. After `allocate_weight`, its buffers are those of `Float8Weight`, with `columns` as in memory. A
    float8 all-gather sends `sent_shard`."""

    recipe: Float8
    sent_shard: Tensor | None
    rows: Tensor
    rows_scale: Tensor
    rows_inverse: Tensor
    columns: Tensor
    columns_scale: Tensor
    columns_inverse: Tensor

    def __init__(self, recipe: Float8, *, precomputed: bool) -> None:
        super().__init__(recipe, precomputed=precomputed)
        self._is_allocated = False
        self.register_buffer("sent_shard", None, persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x · weightᵀ."""
        return float8_linear(x, weight, self.weight_scale, self.recipe, self.quantized_weight)

    def column_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Compute the column-parallel linear; this rank's tokens are cast before they are gathered."""
        if not self._casts_tokens_of(ranks):
            return super().column_parallel(x, weight, ranks)
        recipe = replace(self.recipe, gathers_input=ranks)
        return float8_linear(x, weight, self.weight_scale, recipe, self.quantized_weight)

    def row_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Compute the row-parallel linear; in backward, this rank's gradients are cast before they are gathered."""
        if not self._casts_tokens_of(ranks):
            return super().row_parallel(x, weight, ranks)
        recipe = replace(self.recipe, scatters_output=ranks)
        return float8_linear(x, weight, self.weight_scale, recipe, self.quantized_weight)

    def _casts_tokens_of(self, ranks: TensorParallelCollectives) -> bool:
        """True if tokens are sharded and no matmul needs them in high precision."""
        return ranks.sequence and not self.recipe.high_precision_weight_gradient

    def allocate_weight(self, weight: Tensor) -> None:
        """Allocate the weight in float8, for `Float8Weights` to fill. Scales are NaN until then."""
        self.weight_scale, self._is_allocated = None, True
        outputs, inputs = weight.shape
        scale_shapes = {
            "rows": (outputs, 1) if self.recipe.rowwise else (),
            "columns": (1, inputs) if self.recipe.column_scales else (),
        }
        for layout, shape in {"rows": (outputs, inputs), "columns": (inputs, outputs)}.items():
            self.register_buffer(layout, weight.new_empty(shape, dtype=E4M3), persistent=False)
            for name in ("scale", "inverse"):
                scale = weight.new_full(scale_shapes[layout], torch.nan, dtype=torch.float32)
                self.register_buffer(f"{layout}_{name}", scale, persistent=False)

    @property
    def quantized_weight(self) -> Float8Weight | None:
        """Allocated weight; None if the weight is quantized at each use."""
        if not self._is_allocated:
            return None
        return Float8Weight(
            Float8Matrix(self.rows, self.rows_scale, self.rows_inverse),
            Float8Matrix(self.columns.t(), self.columns_scale, self.columns_inverse),
        )

    def scales_of(self, amax: Tensor) -> Tensor:
        """Scale that maps the amax to the largest e4m3 value."""
        return self.recipe.scale_of_amax(amax, E4M3)


class MXLinearImpl(LinearImpl):
    """MXFP8 recipe. Blocks lie within a shard, so tensor parallelism changes nothing."""

    def __init__(self, *, emulated: bool) -> None:
        super().__init__()
        self.emulated = emulated

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x · weightᵀ."""
        return mxfp8_linear(x, weight, emulated=self.emulated)


class NVFP4LinearImpl(ScaledLinearImpl):
    """NVFP4 recipe. Blocks lie within a shard; tensor scales cover all ranks' shards."""

    recipe: NVFP4

    def __init__(self, recipe: NVFP4, *, emulated: bool, precomputed: bool) -> None:
        super().__init__(recipe, precomputed=precomputed)
        if emulated:
            self._multiply = nvfp4_linear
        else:
            # This comes before the import of the kernels, which older versions of torchao lack.
            if violations := torchao_violations("nvfp4"):
                raise UserError("This run cannot start.", violations)
            from titan_exp.quantization.nvfp4_kernels import nvfp4_native

            self._multiply = nvfp4_native

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x · weightᵀ."""
        return self._multiply(x, weight, self.weight_scale, self.recipe)

    def scales_of(self, amax: Tensor) -> Tensor:
        """Tensor scale that lets block scales use the whole e4m3 range."""
        return self.recipe.scale_of_amax(amax)


def linear_impl_for(config: QuantizationConfig, *, emulated: bool) -> LinearImpl:
    """Build the linear implementation of a recipe."""
    if config.recipe == "mxfp8":
        return MXLinearImpl(emulated=emulated)
    if config.recipe == "nvfp4":
        return NVFP4LinearImpl(NVFP4.of(config), emulated=emulated, precomputed=config.precomputed_scales)
    return Float8LinearImpl(Float8.of(config, emulated=emulated), precomputed=config.precomputed_scales)


MIN_CAPABILITY = {
    "float8_tensorwise": (8, 9),
    "float8_rowwise": (9, 0),
    "float8_rowwise_gw_hp": (9, 0),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Minimum CUDA compute capability of each recipe: 8.9 is Ada, 9.0 Hopper, 10.0 Blackwell."""
GROUPED_MULTIPLE = {"float8_rowwise": 16, "mxfp8": 128}
"""Recipes with a grouped kernel in torchao, and the multiple that it requires of dims and of each expert's rows."""
GROUPED_GENERATIONS = (9, 10)  # major CUDA compute capabilities supported by torch's scaled grouped matmul


class Hardware:
    """Instructions and kernels of a device, as torch reports them; the planner substitutes those of an absent GPU."""

    def has_instructions(self, recipe: str, device: torch.device) -> bool:
        """True if the device has the recipe's instructions."""
        if device.type != "cuda" or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY[recipe]

    def has_grouped_kernels(self, recipe: str, device: torch.device) -> bool:
        """True if torchao has kernels of the recipe's grouped matmul for the device."""
        if recipe not in GROUPED_MULTIPLE or torch.cuda.get_device_capability(device)[0] not in GROUPED_GENERATIONS:
            return False
        if recipe != "mxfp8":
            return True
        with import_torchao():
            from torchao.prototype.moe_training.mxfp8_grouped_mm import _SM100_KERNELS_AVAILABLE
        return bool(_SM100_KERNELS_AVAILABLE)


_HARDWARE = ContextVar("hardware", default=Hardware())  # noqa: B039  # stateless


@contextmanager
def assume_hardware(hardware: Hardware) -> Iterator[None]:
    """Make recipes in the `with` block see this hardware instead of the process's own."""
    token = _HARDWARE.set(hardware)
    try:
        yield
    finally:
        _HARDWARE.reset(token)


def needs_emulation(config: QuantizationConfig, device: torch.device) -> bool:
    """True if the recipe is emulated on this device. Raises UserError if that is forbidden, and it would have to be."""
    has = _HARDWARE.get().has_instructions(config.recipe, device)
    if config.emulate is False and not has:
        major, minor = MIN_CAPABILITY[config.recipe]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        reason = f"{name} lacks the instructions of {config.recipe}, which need CUDA capability {major}.{minor}"
        remedy = "use quantization.emulate=auto, or quantization=none"
        raise UserError("This run cannot start.", [Violation("quantization.emulate", False, reason, remedy)])
    return config.emulate is True or not has


def needs_grouped_emulation(config: QuantizationConfig, device: torch.device) -> bool:
    """True if the recipe's grouped matmul is emulated on this device; torchao's kernels require power-of-two scales."""
    if needs_emulation(config, device) or not config.power_of_two_scales:
        return True
    return not _HARDWARE.get().has_grouped_kernels(config.recipe, device)
