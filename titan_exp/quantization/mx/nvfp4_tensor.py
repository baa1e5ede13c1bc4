"""NVFP4 numbers, emulated: e2m1 with an e4m3 scale for every block of 16 and an fp32 scale for the tensor.

The arithmetic is that of torchao's `nvfp4_quantize`, bit by bit, on plain tensors; that has neither square blocks nor
stochastic rounding, and makes NaN of zeros. A tensor's scale multiplies on the way back, as there.
"""

import torch
from torch import Tensor

BLOCK = 16
"""Numbers that share an e4m3 scale."""

LARGEST = 6.0
"""Of e2m1, whose others are 0, 0.5, 1, 1.5, 2, 3 and 4."""

E4M3 = torch.finfo(torch.float8_e4m3fn)

SMALLEST_SCALE = 2.0**-120
"""Of a tensor: its inverse times that of a block's smallest scale is finite in fp32. Smaller numbers become 0."""


def tensor_scale(amax: Tensor, *, power_of_two: bool) -> Tensor:
    """fp32 scales of tensors with these largest absolute values, which let blocks use e4m3's whole range.

    Args:
        amax: of any shape.
        power_of_two: round up to a power of two.
    """
    scale = (amax.float() / (LARGEST * E4M3.max)).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scale
    mantissa, _ = torch.frexp(scale)  # from 0.5 to below 1, exactly; NaN and infinity become NaN
    return torch.where(mantissa == 0.5, scale, scale / mantissa)


def rounded(matrix: Tensor, scale: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
    """Matrix / scale rounded to NVFP4: e2m1 times the block's e4m3 scale, exact in fp32.

    Args:
        matrix: [rows, columns], columns a multiple of 16.
        scale: of the tensor, a scalar.
        square: blocks are 16 rows by 16 columns instead of 16 numbers of a row; rows are a multiple of 16 too.
        stochastic: round up with the probability that keeps the mean, drawn from the device's generator, instead of to
            the nearest and ties to even. Block scales are rounded to the nearest either way.
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
