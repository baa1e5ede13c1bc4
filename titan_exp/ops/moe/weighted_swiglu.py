"""SwiGLU times the weight of each row, for experts: scaling their output is scaling the down projection's input.

`combine` then is a plain sum whose backward needs no rows: the gradient of a weight is a dot product of ffn numbers
that SwiGLU's backward has at hand, and not of dim numbers that would be kept for it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.runs_kernel import runs_kernel
from titan_exp.ops.swiglu import GROUP

ROWS = 4
"""Rows per kernel program."""
BLOCK = 256
"""Columns that a program has at a time."""


def weighted_swiglu(
    gate_up: Float[Tensor, "rows two_ffn"], weights: Float[Tensor, " rows"], group: int = GROUP
) -> Float[Tensor, "rows ffn"]:
    """silu(gate) · up · weight, where `gate_up` alternates `group` gate columns and `group` up columns.

    The products are in fp32 and rounded once. Backward keeps `gate_up` and `weights` alone.
    """
    if torch.compiler.is_compiling():
        # The compiler derives the same backward and fuses it.
        return _forward(gate_up, weights, group)
    return _WeightedSwiGLU.apply(gate_up, weights, group)  # type: ignore[return-value]  # a Tensor


def _halves(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return gate, up


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _forward(gate_up: Tensor, weights: Tensor, group: int) -> Tensor:
    gate, up = _halves(gate_up, group)
    product = _wide(F.silu(gate)) * up * weights[:, None, None]
    return product.to(gate_up.dtype).flatten(-2)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, group: int) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.group = group
        if runs_kernel(gate_up):
            return _weighted_swiglu(gate_up.contiguous(), weights.contiguous(), group)
        return _forward(gate_up, weights, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate_up, weights = ctx.saved_tensors
        if runs_kernel(gate_up):
            operands = (tensor.contiguous() for tensor in (gate_up, weights, gradients[0]))
            return *_weighted_swiglu_backward(*operands, ctx.group), None
        gate, up = _halves(gate_up, ctx.group)
        gradient, silu = _wide(gradients[0]).unflatten(-1, (-1, ctx.group)), F.silu(gate)
        weights_grad = (gradient * (_wide(silu) * up)).sum((-2, -1)).to(weights.dtype)
        gradient = gradient * weights[:, None, None]
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = _halves(gate_up_grad, ctx.group)
        up_grad.copy_(gradient * silu)
        torch.ops.aten.silu_backward.grad_input((gradient * up).to(gate.dtype), gate, grad_input=gate_grad)
        return gate_up_grad, weights_grad, None


@torch.library.custom_op("titan_exp::weighted_swiglu", mutates_args=())
def _weighted_swiglu(gate_up: Tensor, weights: Tensor, group: int) -> Tensor:
    out = _empty_output(gate_up, weights, group)
    _launch("weighted_swiglu_kernel", out, gate_up, weights, out, group=group)
    return out


@torch.library.custom_op("titan_exp::weighted_swiglu_backward", mutates_args=())
def _weighted_swiglu_backward(gate_up: Tensor, weights: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gradients = _empty_gradients(gate_up, weights, gradient, group)
    _launch("weighted_swiglu_backward_kernel", gradient, gate_up, weights, gradient, *gradients, group=group)
    return gradients


@_weighted_swiglu.register_fake
def _empty_output(gate_up: Tensor, weights: Tensor, group: int) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@_weighted_swiglu_backward.register_fake
def _empty_gradients(gate_up: Tensor, weights: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(weights)


def _launch(name: str, output: Tensor, *tensors: Tensor, group: int) -> None:
    rows, ffn = output.shape
    if isinstance(output, FakeTensor) or output.numel() == 0:  # experts may get no token
        return
    from titan_exp.ops.moe import weighted_swiglu_kernels

    launch: Any = getattr(weighted_swiglu_kernels, name)[(-(-rows // ROWS),)]
    launch(*tensors, rows, ffn, group=group, side=ROWS, block=BLOCK)
