"""SwiGLU (Shazeer 2020) on a fused gate and up projection."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.runs_kernel import runs_kernel

GROUP = 32
"""Gate and up columns alternate in groups of this many, so that tensor-parallel slices hold matching halves of both."""
BLOCK = 1024
"""Numbers of the output per kernel program."""


def swiglu(gate_up: Float[Tensor, "*rows two_ffn"], group: int = GROUP) -> Float[Tensor, "*rows ffn"]:
    """silu(gate) · up, where `gate_up` alternates `group` gate columns and `group` up columns.

    Backward keeps `gate_up` alone.
    """
    if torch.compiler.is_compiling():
        # The compiler derives the same backward and fuses it.
        return _forward(gate_up, group)
    return _SwiGLU.apply(gate_up, group)  # type: ignore[return-value]  # a Tensor


def _halves(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return gate, up


def _forward(gate_up: Tensor, group: int) -> Tensor:
    gate, up = _halves(gate_up, group)
    return (F.silu(gate) * up).flatten(-2)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.group = group
        return _swiglu(gate_up.contiguous(), group) if runs_kernel(gate_up) else _forward(gate_up, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        if runs_kernel(gate_up):
            return _swiglu_backward(gate_up.contiguous(), gradients[0].contiguous(), ctx.group), None
        gate, up = _halves(gate_up, ctx.group)
        gradient = gradients[0].unflatten(-1, (-1, ctx.group))
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = _halves(gate_up_grad, ctx.group)
        torch.mul(gradient, F.silu(gate), out=up_grad)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gate_grad)
        return gate_up_grad, None


@torch.library.custom_op("titan_exp::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor, group: int) -> Tensor:
    out = _empty_output(gate_up, group)
    if not isinstance(gate_up, FakeTensor):
        from titan_exp.ops.swiglu_kernels import swiglu_kernel

        _launch(swiglu_kernel, gate_up, out, size=out.numel(), group=group)
    return out


@torch.library.custom_op("titan_exp::swiglu_backward", mutates_args=())
def _swiglu_backward(gate_up: Tensor, gradient: Tensor, group: int) -> Tensor:
    gate_up_grad = torch.empty_like(gate_up)
    if not isinstance(gate_up, FakeTensor):
        from titan_exp.ops.swiglu_kernels import swiglu_backward_kernel

        _launch(swiglu_backward_kernel, gate_up, gradient, gate_up_grad, size=gradient.numel(), group=group)
    return gate_up_grad


@_swiglu.register_fake
def _empty_output(gate_up: Tensor, group: int) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_swiglu_backward.register_fake
def _empty_gradient(gate_up: Tensor, gradient: Tensor, group: int) -> Tensor:
    return torch.empty_like(gate_up)


def _launch(kernel: Any, *tensors: Tensor, size: int, group: int) -> None:
    if size:  # experts may get no token
        kernel[(-(-size // BLOCK),)](*tensors, size, group=group, block=BLOCK)
