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

from titan_exp.ops.clamped_swiglu import clamped_swiglu, halves
from titan_exp.ops.runs_kernel import runs_kernel
from titan_exp.ops.swiglu import GROUP
from titan_exp.ops.swiglu_chunks import swiglu_backward_in_chunks, swiglu_in_chunks
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

ROWS = 4
"""Rows per kernel program."""
BLOCK = 256
"""Columns that a program has at a time."""


def weighted_swiglu(
    gate_up: Float[Tensor, "rows two_ffn"],
    weights: Float[Tensor, " rows"],
    group: int = GROUP,
    variant: SwiGLUVariant = SWIGLU,
) -> Float[Tensor, "rows ffn"]:
    """silu(gate) · up · weight, where `gate_up` alternates `group` gate columns and `group` up columns; or a variant.

    The products are in fp32 and rounded once. Backward keeps `gate_up` and `weights` alone.
    """
    if torch.compiler.is_compiling():
        # The compiler derives the same backward and fuses it.
        plain = variant == SWIGLU
        return _forward(gate_up, weights, group) if plain else clamped_swiglu(gate_up, weights, group, variant)
    return _WeightedSwiGLU.apply(gate_up, weights, group, variant)  # type: ignore[return-value]  # a Tensor


def _forward(gate_up: Tensor, weights: Tensor, group: int) -> Tensor:
    gate, up = halves(gate_up, group)
    silu = F.silu(gate)
    product = silu.to(torch.promote_types(silu.dtype, torch.float32)) * up * weights[:, None, None]
    return product.to(gate_up.dtype).flatten(-2)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, group: int, variant: SwiGLUVariant) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.group, ctx.variant = group, variant
        return _weighted_swiglu(gate_up.contiguous(), weights.contiguous(), group, **variant.numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate_up, weights = ctx.saved_tensors
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        return *weighted_swiglu_backward(gate_up, weights, gradient, ctx.group, ctx.variant), None, None


def weighted_swiglu_backward(
    gate_up: Float[Tensor, "rows two_ffn"],
    weights: Float[Tensor, " rows"],
    gradient: Float[Tensor, "rows ffn"],
    group: int = GROUP,
    variant: SwiGLUVariant = SWIGLU,
) -> tuple[Float[Tensor, "rows two_ffn"], Float[Tensor, " rows"]]:
    """Gradients of `gate_up` and `weights` from the contiguous one of the output, over which it writes the output."""
    return _weighted_swiglu_backward(gate_up.contiguous(), weights.contiguous(), gradient, group, **variant.numbers)


@torch.library.custom_op("titan_exp::weighted_swiglu", mutates_args=())
def _weighted_swiglu(
    gate_up: Tensor, weights: Tensor, group: int, *, alpha: float, limit: float | None, offset: float
) -> Tensor:
    variant = SwiGLUVariant(alpha, limit, offset)
    if not runs_kernel(gate_up):
        return swiglu_in_chunks(gate_up, weights, group, variant)
    out = _empty_output(gate_up, weights, group)
    _launch("weighted_swiglu_kernel", out, gate_up, weights, out, group=group, **variant.numbers)
    return out


@torch.library.custom_op("titan_exp::weighted_swiglu_backward", mutates_args=("gradient",))
def _weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, gradient: Tensor, group: int, *, alpha: float, limit: float | None, offset: float
) -> tuple[Tensor, Tensor]:
    variant = SwiGLUVariant(alpha, limit, offset)
    if not runs_kernel(gate_up):
        gate_up_grad, weights_grad = swiglu_backward_in_chunks(gate_up, weights, gradient, group, variant)
        assert weights_grad is not None, "weights are given"
        return gate_up_grad, weights_grad
    gradients = _empty_gradients(gate_up, weights, gradient, group)
    tensors = gate_up, weights, gradient, *gradients
    _launch("weighted_swiglu_backward_kernel", gradient, *tensors, group=group, **variant.numbers)
    return gradients


@_weighted_swiglu.register_fake
def _empty_output(gate_up: Tensor, weights: Tensor, group: int, **_: float | None) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@_weighted_swiglu_backward.register_fake
def _empty_gradients(
    gate_up: Tensor, weights: Tensor, gradient: Tensor, group: int, **_: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(weights)


def _launch(name: str, output: Tensor, *tensors: Tensor, **constants: Any) -> None:
    rows, ffn = output.shape
    if isinstance(output, FakeTensor) or output.numel() == 0:  # experts may get no token
        return
    from titan_exp.ops.moe import weighted_swiglu_kernels

    launch: Any = getattr(weighted_swiglu_kernels, name)[(-(-rows // ROWS),)]
    launch(*tensors, rows, ffn, **constants, side=ROWS, block=BLOCK)
