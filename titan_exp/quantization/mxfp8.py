"""MXFP8 linear: e4m3 with a power-of-two scale per 32 numbers of the contracted dim (OCP Microscaling 1.0).

Scales round up (torchao's RCEIL, as in cuBLAS), so nothing saturates. Blocks lie within a shard, so ranks need no
communication.
"""

from typing import Any

import torch
from torch import Tensor

from titan_exp.config.torch_features import import_torchao
from titan_exp.ops.autograd import needs_input_grad
from titan_exp.quantization.float8 import unflatten

with import_torchao():
    from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice, ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

BLOCK = 32  # number of elements that share a scale
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def mxfp8_linear(x: Tensor, weight: Tensor, *, emulated: bool) -> Tensor:
    """Compute x · weightᵀ, [..., inputs] and [outputs, inputs]; all three matmuls of forward and backward are
    quantized. `emulated` multiplies the rounded numbers in high precision."""
    return _MXLinear.apply(x, weight, emulated)  # type: ignore[return-value]  # a Tensor


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, emulated: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.emulated = emulated
        return unflatten(_multiply(x.reshape(-1, x.shape[-1]), weight, emulated), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        x_grad = weight_grad = None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        if needs_x_grad:
            x_grad = unflatten(_multiply(gradient, weight.t(), ctx.emulated), gradients[0])
        if needs_weight_grad:
            weight_grad = _multiply(gradient.t(), x.reshape(-1, x.shape[-1]).t(), ctx.emulated)
        return x_grad, weight_grad, None


def _multiply(left: Tensor, right: Tensor, emulated: bool) -> Tensor:
    """Multiply left [m, k] by rightᵀ [n, k], quantized along k."""
    left, right = left.contiguous(), right.contiguous()
    if emulated:
        return torch.mm(rounded(left), rounded(right).t())
    return torch.mm(_quantized(left), _quantized(right).t())


def rounded(tensor: Tensor) -> Tensor:
    """Round values to MXFP8 but keep their dtype, which represents e4m3 times a power of two exactly. torchao's
    function for this cannot be compiled with a memory budget."""
    blocks = tensor.float().unflatten(-1, (-1, BLOCK))
    exponent = (blocks.abs().amax(-1, keepdim=True) / LARGEST).log2().ceil().clamp(-127, 127)
    # The scale of a (nearly) zero block is 1.
    scale = exponent.exp2().where(exponent > -127, 1.0)
    rounded = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).to(tensor.dtype)


def _quantized(tensor: Tensor) -> Tensor:
    choices = ScaleCalculationMode.RCEIL, KernelPreference.AUTO
    kernel = MXFP8Dim0CastKernelChoice.TRITON
    return MXTensor.to_mx(tensor, torch.float8_e4m3fn, BLOCK, *choices, mxfp8_dim0_cast_kernel_choice=kernel)
