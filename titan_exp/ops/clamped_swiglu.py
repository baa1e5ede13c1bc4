"""Variants of SwiGLU with clamps (GPT-OSS), for feed-forwards and, times the weight of each row, for experts.

Computed in fp32 and rounded once.
"""

import torch
from torch import Tensor

from titan_exp.ops.swiglu_variant import SwiGLUVariant


def halves(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Gate and up columns [rows, ffn / group, group] of [rows, 2 · ffn]."""
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return gate, up


def clamped_swiglu(gate_up: Tensor, weights: Tensor | None, group: int, variant: SwiGLUVariant) -> Tensor:
    """A variant of SwiGLU, where `gate_up` alternates `group` gate columns and `group` up columns; times `weights`."""
    gate, up = _clamped(gate_up, variant, group)
    out = up * gate * (variant.alpha * gate).sigmoid()
    out = out if weights is None else out * weights[:, None, None]
    return out.to(gate_up.dtype).flatten(-2)


def clamped_swiglu_backward(  # noqa: PLR0917  # as of `clamped_swiglu`
    gate_up: Tensor,
    weights: Tensor | None,
    gradient: Tensor,
    gate_up_grad: Tensor,
    group: int,
    variant: SwiGLUVariant,
) -> Tensor | None:
    """Write the gradient of `gate_up`, and return that of `weights`, if given; then overwrite `gradient` with the
    output.
    """
    gate, up = _clamped(gate_up, variant, group)
    change, sigmoid = gradient.to(gate.dtype).unflatten(-1, (-1, group)), (variant.alpha * gate).sigmoid()
    weights_grad = None
    if weights is not None:
        product = up * gate * sigmoid
        weights_grad = (change * product).sum((-2, -1)).to(weights.dtype)
        change = change * weights[:, None, None]
        gradient.unflatten(-1, (-1, group)).copy_(product * weights[:, None, None])
    gate_grad, up_grad = halves(gate_up_grad, group)
    of_gate = change * up * sigmoid * (1 + variant.alpha * gate * (1 - sigmoid))
    of_up = change * gate * sigmoid
    if variant.limit is not None:
        raw_gate, raw_up = halves(gate_up, group)
        of_gate.masked_fill_(raw_gate > variant.limit, 0)
        of_up.masked_fill_(raw_up.abs() > variant.limit, 0)
    gate_grad.copy_(of_gate)
    up_grad.copy_(of_up)
    return weights_grad


def _clamped(gate_up: Tensor, variant: SwiGLUVariant, group: int) -> tuple[Tensor, Tensor]:
    """Gate and up within their limits, up with its offset, in fp32 at least."""
    gate, up = halves(gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)), group)
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(-variant.limit, variant.limit)
    return gate, up + variant.offset
