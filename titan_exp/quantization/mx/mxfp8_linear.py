"""MXFP8: e4m3 with a power-of-two scale for every 32 numbers along what is contracted (OCP Microscaling 1.0).

Scales are rounded up (torchao's RCEIL, cuBLAS's own), so that nothing is cut off; a block is whole on one rank where
that has a multiple of 32, so no rank has to ask another.
"""

from typing import Any

import torch
from torch import Tensor

from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.quantization.torchao import (
    KernelPreference,
    MXFP8Dim0CastKernelChoice,
    MXTensor,
    ScaleCalculationMode,
)

BLOCK = 32
"""Numbers that share a scale."""

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def mxfp8_linear(x: Tensor, weight: Tensor, *, emulated: bool) -> Tensor:
    """x · weightᵀ, [..., inputs] and [outputs, inputs]; all three products of forward and backward are quantized.

    Args:
        x: high precision.
        weight: high precision.
        emulated: multiply the rounded numbers in high precision.
    """
    return _MXLinear.apply(x, weight, emulated)  # type: ignore[return-value]  # a Tensor


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, emulated: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.emulated = emulated
        output = _multiply(x.reshape(-1, x.shape[-1]), weight, emulated)
        return output.unflatten(0, x.shape[:-1]) if x.dim() != 2 else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_x = of_weight = None
        wants_x, wants_weight = needs_input_grad(ctx)
        if wants_x:
            of_x = _multiply(gradient, weight.t(), ctx.emulated)
            of_x = of_x.unflatten(0, gradients[0].shape[:-1]) if gradients[0].dim() != 2 else of_x
        if wants_weight:
            of_weight = _multiply(gradient.t(), x.reshape(-1, x.shape[-1]).t(), ctx.emulated)
        return of_x, of_weight, None


def _multiply(left: Tensor, right: Tensor, emulated: bool) -> Tensor:
    """left · rightᵀ, [m, k] and [n, k], quantized along k."""
    left, right = left.contiguous(), right.contiguous()
    if emulated:
        return torch.mm(rounded(left), rounded(right).t())
    return torch.mm(_quantized(left), _quantized(right).t())


def rounded(tensor: Tensor) -> Tensor:
    """Values rounded to MXFP8 in their own dtype, which represents e4m3 times a power of two exactly.

    torchao's own function for this cannot be compiled within a memory budget.
    """
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    exponent = (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil().clamp(-127, 127)
    # Of a block of zeros, or nearly so, the scale is 1.
    scale = exponent.exp2().where(exponent > -127, 1.0)
    rounded = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(tensor.dtype)


def _quantized(tensor: Tensor) -> Tensor:
    return MXTensor.to_mx(
        tensor,
        torch.float8_e4m3fn,
        BLOCK,
        ScaleCalculationMode.RCEIL,
        KernelPreference.AUTO,
        mxfp8_dim0_cast_kernel_choice=MXFP8Dim0CastKernelChoice.TRITON,
    )
