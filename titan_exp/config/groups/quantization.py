"""Group `quantization`: low-precision matmuls."""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from titan_exp.config.groups.types import Count

BLOCK = {"float8_tensorwise": 16, "float8_rowwise": 16, "float8_rowwise_gw_hp": 16, "mxfp8": 32, "nvfp4": 16}
"""Multiple that every dim of a quantized matmul must be, by recipe: 16 bytes of float8, a block of MX or NVFP4."""

BLOCK_SCALED = ("mxfp8", "nvfp4")
"""Recipes with a scale for every block of a matrix."""

DUAL_CAST_RECIPES = ("float8_tensorwise", "float8_rowwise")
"""Recipes that use a matrix in float8 both untransposed and transposed."""

MIN_TORCHAO = {"nvfp4": (0, 18)}
"""First torchao version with a recipe's kernels, by recipe; the others need the version that the package requires."""

NVFP4_TILE = 128
"""Multiple for torchao's NVFP4 kernels, which lay out scales in tiles."""


@dataclass(frozen=True)
class QuantizationConfig:
    """Recipe for the matmuls of the blocks' linear layers. Embedding, head, norms and attention are never quantized,
    nor modulations, which read one vector per sequence."""

    recipe: Literal["none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8", "nvfp4"] = "none"
    """Recipe of matmuls: `none`, in the type of `training.mixed_precision`; `float8_tensorwise`, one scale for a whole
    tensor; `float8_rowwise`, one for every token and every output; `float8_rowwise_gw_hp`, the same with weight
    gradients in high precision; `mxfp8`, one for every 32 numbers (OCP Microscaling); `nvfp4`, 4 bits and one for every
    16 numbers (NVIDIA 2025).

    `float8_tensorwise` has gradients in e5m2, `float8_rowwise` all in e4m3. `nvfp4` has numbers in e2m1, with an e4m3
    scale for every 16 and an fp32 one for the tensor, weights in blocks of 16 by 16, and weight gradients from
    Hadamard-transformed tokens (arXiv:2509.25149). E.g. `quantization.recipe=none`."""
    filter: list[str] = field(default_factory=list)
    """Names or patterns of linear layers that stay in high precision, as in `blocks.*.attention.*`.
    E.g. `quantization.filter='[blocks.*.attention.*]'`."""
    smallest_gemm: Count | None = 0
    """Fewest inputs and outputs, unsharded, of a linear layer that is quantized: casting costs more than a small matmul
    gains. null is 4096 on GPUs, and 0 if the recipe is emulated.

    The run's config.yaml has the number. E.g. `quantization.smallest_gemm=2048`."""
    high_precision_first: Count = 0
    """Number of first blocks that stay in high precision. E.g. `quantization.high_precision_first=1`."""
    high_precision_last: Count = 0
    """Number of last blocks that stay in high precision. E.g. `quantization.high_precision_last=2`."""
    power_of_two_scales: bool = True
    """Round scales to powers of two, so that the curve does not depend on the layout.

    Of NVFP4 it is the tensor's scale. A number is then rounded to the same value whichever tensor it shares its scale
    with, unless it, or of NVFP4 all of its block, is smaller than about 2^-14 of the largest there. Without, one
    device's results are those of torchao's default, and depend on the micro-batch size, dp and cp.
    E.g. `quantization.power_of_two_scales=false`."""
    stochastic_rounding: bool = False
    """Recipe `nvfp4`: round output gradients stochastically, so that they are unbiased; false rounds to nearest.

    The random numbers depend on the seed, the step, the data-parallel rank and the sharding of tokens and outputs: a
    resumed run repeats them bit for bit, another layout draws others and its curve differs as with another seed.
    E.g. `quantization.stochastic_rounding=true`."""
    float8_all_gather: bool = False
    """Recipe `float8_tensorwise`: quantize a shard before FSDP's all-gather, which sends half the bytes, and no rank
    quantizes the whole weight.

    Results are the same. No effect without sharding. E.g. `quantization.float8_all_gather=false`."""
    precomputed_scales: bool = False
    """Recipes with one scale per weight: compute all scales after each optimizer step, with one all-reduce, instead of
    one by one at use.

    Results are the same. No effect for float8 at one data rank, which quantizes every weight once per optimizer step
    and keeps it in float8 in both layouts. E.g. `quantization.precomputed_scales=false`."""
    fused_casts: Literal["auto", True, False] = "auto"
    """Recipes `float8_tensorwise` and `float8_rowwise`, on GPUs: cast a gradient as it is and transposed, for both
    matmuls that use it, in one pass. `auto` does so where the recipe is not emulated. Results are the same.

    A Triton kernel reads the gradient once; without compilation an activation too, which backward keeps transposed, one
    byte a number. Compiled code casts an activation again in backward, with what recomputes it.
    E.g. `quantization.fused_casts=false`."""
    emulate: Literal["auto", True, False] = "auto"
    """Emulate the recipe on any device: round as it does and multiply in fp32, which is no faster than bf16. `auto`
    emulates if the device lacks the instructions, and logs it. E.g. `quantization.emulate=true`."""

    @property
    def has_dual_casts(self) -> bool:
        """True if the recipe uses activations and gradients in float8 in both layouts."""
        return self.recipe in DUAL_CAST_RECIPES

    @property
    def whole_weight_scales(self) -> bool:
        """True if the recipe has one scale per weight."""
        return self.recipe in ("float8_tensorwise", "float8_rowwise_gw_hp", "nvfp4")

    def quantizes(self, name: str, inputs: int, outputs: int, *, layers: int) -> bool:
        """True if the recipe quantizes a linear layer, by its name, its unsharded shape and the number of blocks.

        `smallest_gemm` must be resolved.
        """
        assert self.smallest_gemm is not None, "the recipe is not resolved"
        numbered = re.match(r"blocks\.(\d+)\.", name)
        layer = int(numbered[1]) if numbered else None
        return (
            self.recipe != "none"
            and min(inputs, outputs) >= self.smallest_gemm
            and (layer is None or self.high_precision_first <= layer < layers - self.high_precision_last)
            and not any(fnmatchcase(name, pattern) for pattern in self.filter)
        )
