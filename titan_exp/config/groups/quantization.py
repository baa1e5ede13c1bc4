"""Group `quantization`: which matmuls are computed in fewer bits, and how."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import Count

BLOCK = {"float8_tensorwise": 16, "float8_rowwise": 16, "float8_rowwise_gw_hp": 16, "mxfp8": 32, "nvfp4": 16}
"""What every dim of a quantized matmul is a multiple of, by recipe: 16 bytes of float8, a block of MX or NVFP4."""

NVFP4_TILE = 128
"""What torchao's NVFP4 kernels want in its place: they lay out scales in tiles."""


@dataclass(frozen=True)
class QuantizationConfig:
    """A recipe for the matmuls of the blocks' projections. Embedding, head, norms and attention are never quantized."""

    recipe: Literal["none", "float8_tensorwise", "float8_rowwise", "float8_rowwise_gw_hp", "mxfp8", "nvfp4"]
    """`none` multiplies in the type of `training.mixed_precision`. `float8_tensorwise` has one scale for a whole
    tensor, gradients in e5m2; `float8_rowwise` one for every token and every output, all in e4m3;
    `float8_rowwise_gw_hp` the same with weight gradients in high precision; `mxfp8` one for every 32 numbers (OCP
    Microscaling). `nvfp4` has numbers of 4 bits, e2m1, with an e4m3 scale for every 16 and an fp32 one for the tensor,
    weights in blocks of 16 by 16, and weight gradients from Hadamard-transformed tokens (NVIDIA 2025,
    arXiv:2509.25149)."""
    filter: list[str]
    """Names or patterns of projections that stay in high precision, as in `blocks.*.attention.*`."""
    smallest_gemm: Count | None
    """A projection stays in high precision where its inputs or its outputs, of the whole weight, are fewer: casting
    costs more than a small matmul gains. null is 4096 on GPUs, and 0 where the recipe is emulated anyway; the run's
    config.yaml has the number."""
    high_precision_first: Count
    """So many blocks at the beginning stay in high precision."""
    high_precision_last: Count
    """So many blocks at the end stay in high precision."""
    power_of_two_scales: bool
    """Round scales to powers of two, of NVFP4 the tensor's. Then a number is rounded to the same value whichever tensor
    it shares its scale with, unless it, or of NVFP4 all of its block, is smaller than about 2^-14 of the largest there:
    so the curve does not depend on the layout. Without, one device's results are those of torchao's default, and depend
    on the micro-batch size, dp and cp."""
    stochastic_rounding: bool
    """Of `nvfp4`: round gradients of outputs up or down at random, so that they are right on average; false rounds to
    the nearest. What is drawn depends on the seed, the step and the data rank, and on how tokens and outputs are
    divided: a resumed run repeats it to the bit, another layout draws otherwise, and its curve differs as another
    seed's would. So it is off unless asked for."""
    float8_all_gather: bool
    """Of `float8_tensorwise`: quantize a shard before it is gathered, so that half the bytes are sent and no rank
    quantizes the whole weight. The numbers are the same. Without effect where nothing is sharded."""
    precomputed_scales: bool
    """Of recipes with one scale for a whole weight: compute those of all weights together after each optimizer step,
    with one message, instead of each where it is used. The numbers are the same."""
    fused_casts: bool
    """Of `float8_tensorwise` and `float8_rowwise`, on GPUs: a kernel of ours reads an activation, or a gradient, once
    and casts it for both products that it is in, as it is and transposed. The numbers are the same; what it gains has
    not been measured. Without effect where the recipe is emulated."""
    emulate: Literal["auto", True, False]
    """Round as the recipe says and multiply in fp32, which any device can and none is faster by. `auto` does so where
    the device lacks the instructions, and the log says it."""

    @property
    def whole_weight_scales(self) -> bool:
        """Whether the recipe has one scale for a whole weight."""
        return self.recipe in ("float8_tensorwise", "float8_rowwise_gw_hp", "nvfp4")
