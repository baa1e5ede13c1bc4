"""Emulated NVFP4 numbers: e2m1 with an e4m3 scale per block of 16 and an fp32 scale per tensor.

The arithmetic is that of torchao's `nvfp4_quantize`, bit by bit, on plain tensors; torchao's lacks square blocks and
stochastic rounding, and makes NaN of zeros.
"""

import torch
from torch import Tensor

BLOCK = 16
"""Numbers that share an e4m3 scale."""

LARGEST = 6.0
"""Largest e2m1 value; the others are 0, 0.5, 1, 1.5, 2, 3 and 4."""

E4M3 = torch.finfo(torch.float8_e4m3fn)

SMALLEST_SCALE = 2.0**-120
"""Minimum tensor scale, so that its inverse times that of the smallest block scale is finite in fp32."""


def tensor_scale(amax: Tensor, *, power_of_two: bool) -> Tensor:
    """fp32 scales from amax values of any shape, which let blocks use e4m3's whole range.

    `power_of_two` rounds up to a power of two.
    """
    scale = (amax.float() / (LARGEST * E4M3.max)).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scale
    mantissa, _ = torch.frexp(scale)  # from 0.5 to below 1, exactly; NaN and infinity become NaN
    return torch.where(mantissa == 0.5, scale, scale / mantissa)


def rounded(matrix: Tensor, scale: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
    """matrix [rows, columns] / scale rounded to NVFP4: e2m1 times the block's e4m3 scale, exact in fp32.

    `square` blocks are 16 by 16, else 16 numbers of a row; affected dims are multiples of 16. `stochastic` rounds up
    with the probability that keeps the mean, drawn from the device's generator; block scales always round to the
    nearest.
    """
    rows, columns = matrix.shape
    height = BLOCK if square else 1
    blocks = matrix.float().reshape(rows // height, height, columns // BLOCK, BLOCK)
    block_scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST / scale
    block_scale = block_scale.clamp(E4M3.tiny, E4M3.max).to(torch.float8_e4m3fn).float()
    numbers = (blocks * (1.0 / scale / block_scale)).clamp(-LARGEST, LARGEST)
    size = numbers.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return (numbers.sign() * steps * step * block_scale).reshape(rows, columns)
