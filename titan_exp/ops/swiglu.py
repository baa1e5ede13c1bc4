"""SwiGLU (Shazeer 2020) on a fused gate and up projection."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.clamped_swiglu import clamped_swiglu, halves
from titan_exp.ops.runs_kernel import runs_kernel
from titan_exp.ops.swiglu_chunks import swiglu_backward_in_chunks, swiglu_in_chunks
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

GROUP = 32
"""Gate and up columns alternate in groups of this many, so that tensor-parallel slices hold matching halves of both."""
BLOCK = 1024
"""Numbers of the output per kernel program."""


def swiglu(
    gate_up: Float[Tensor, "*rows two_ffn"], group: int = GROUP, variant: SwiGLUVariant = SWIGLU
) -> Float[Tensor, "*rows ffn"]:
    """silu(gate) · up or a variant, where `gate_up` alternates `group` gate columns and `group` up columns.

    Backward keeps `gate_up` alone.
    """
    if torch.compiler.is_compiling():
        # The compiler derives the same backward and fuses it.
        return _forward(gate_up, group) if variant == SWIGLU else clamped_swiglu(gate_up, None, group, variant)
    return _SwiGLU.apply(gate_up, group, variant)  # type: ignore[return-value]  # a Tensor


def _forward(gate_up: Tensor, group: int) -> Tensor:
    gate, up = halves(gate_up, group)
    return (F.silu(gate) * up).flatten(-2)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, group: int, variant: SwiGLUVariant) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.group, ctx.variant = group, variant
        return _swiglu(gate_up.contiguous(), group, **variant.numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        return _swiglu_backward(gate_up.contiguous(), gradient, ctx.group, **ctx.variant.numbers), None, None


@torch.library.custom_op("titan_exp::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor, group: int, *, alpha: float, limit: float | None, offset: float) -> Tensor:
    variant = SwiGLUVariant(alpha, limit, offset)
    if not runs_kernel(gate_up):
        return swiglu_in_chunks(gate_up, None, group, variant)
    out = _empty_output(gate_up, group)
    if not isinstance(gate_up, FakeTensor):
        from titan_exp.ops.swiglu_kernels import swiglu_kernel

        _launch(swiglu_kernel, gate_up, out, size=out.numel(), group=group, **variant.numbers)
    return out


@torch.library.custom_op("titan_exp::swiglu_backward", mutates_args=())
def _swiglu_backward(
    gate_up: Tensor, gradient: Tensor, group: int, *, alpha: float, limit: float | None, offset: float
) -> Tensor:
    variant = SwiGLUVariant(alpha, limit, offset)
    if not runs_kernel(gate_up):
        return swiglu_backward_in_chunks(gate_up, None, gradient, group, variant)[0]
    gate_up_grad = torch.empty_like(gate_up)
    if not isinstance(gate_up, FakeTensor):
        from titan_exp.ops.swiglu_kernels import swiglu_backward_kernel

        _launch(
            swiglu_backward_kernel,
            gate_up,
            gradient,
            gate_up_grad,
            size=gradient.numel(),
            group=group,
            **variant.numbers,
        )
    return gate_up_grad


@_swiglu.register_fake
def _empty_output(gate_up: Tensor, group: int, **_: float | None) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_swiglu_backward.register_fake
def _empty_gradient(gate_up: Tensor, gradient: Tensor, group: int, **_: float | None) -> Tensor:
    return torch.empty_like(gate_up)


def _launch(kernel: Any, *tensors: Tensor, size: int, **constants: Any) -> None:
    if size:  # experts may get no token
        kernel[(-(-size // BLOCK),)](*tensors, size, **constants, block=BLOCK)
