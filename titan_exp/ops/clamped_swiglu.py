"""Variants of SwiGLU with clamps (GPT-OSS), for feed-forwards and, times the weight of each row, for experts.

Computed in fp32 and rounded once. Backward keeps the fused gate and up alone, as that of plain SwiGLU.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from titan_exp.ops.swiglu_chunks import halves
from titan_exp.ops.swiglu_variant import SwiGLUVariant


def clamped_swiglu(
    gate_up: Float[Tensor, "*rows two_ffn"],
    weights: Float[Tensor, " rows"] | None,
    variant: SwiGLUVariant,
    group: int,
) -> Float[Tensor, "*rows ffn"]:
    """A variant of SwiGLU, where `gate_up` alternates `group` gate columns and `group` up columns; times `weights`."""
    if torch.compiler.is_compiling():
        # The compiler derives the same backward and fuses it.
        return _forward(gate_up, weights, variant, group)
    return _ClampedSwiGLU.apply(gate_up, weights, variant, group)  # type: ignore[return-value]  # a Tensor


def _clamped(gate_up: Tensor, variant: SwiGLUVariant, group: int) -> tuple[Tensor, Tensor]:
    """Gate and up within their limits, up with its offset, in fp32 at least."""
    gate, up = halves(gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)), group)
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(-variant.limit, variant.limit)
    return gate, up + variant.offset


def _forward(gate_up: Tensor, weights: Tensor | None, variant: SwiGLUVariant, group: int) -> Tensor:
    gate, up = _clamped(gate_up, variant, group)
    out = up * gate * (variant.alpha * gate).sigmoid()
    out = out if weights is None else out * weights[:, None, None]
    return out.to(gate_up.dtype).flatten(-2)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor | None, variant: SwiGLUVariant, group: int) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.variant, ctx.group = variant, group
        return _forward(gate_up, weights, variant, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate_up, weights = ctx.saved_tensors
        variant, group = ctx.variant, ctx.group
        gate, up = _clamped(gate_up, variant, group)
        gradient, sigmoid = gradients[0].to(gate.dtype).unflatten(-1, (-1, group)), (variant.alpha * gate).sigmoid()
        weights_grad = None
        if weights is not None:
            weights_grad = (gradient * (up * gate * sigmoid)).sum((-2, -1)).to(weights.dtype)
            gradient = gradient * weights[:, None, None]
        gate_up_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = halves(gate_up_grad, group)
        of_gate = gradient * up * sigmoid * (1 + variant.alpha * gate * (1 - sigmoid))
        of_up = gradient * gate * sigmoid
        if variant.limit is not None:
            raw_gate, raw_up = halves(gate_up, group)
            of_gate.masked_fill_(raw_gate > variant.limit, 0)
            of_up.masked_fill_(raw_up.abs() > variant.limit, 0)
        gate_grad.copy_(of_gate)
        up_grad.copy_(of_up)
        return gate_up_grad, weights_grad, None, None
