"""SwiGLU (Shazeer 2020) on a fused gate and up projection, its variants with clamps (GPT-OSS), and row weights.

Uncompiled, torch's operators compute chunks of rows, because on a CPU passes over memory and page faults cost most.
Gates in bf16 are made contiguous first, because torch's SiLU on groups of 32 columns takes five times as long. A
variant is computed in fp32 and rounded once.

Row weights are those of experts: scaling an expert's output equals scaling its down projection's input. Then `combine`
is a plain sum whose backward needs no rows. A weight's gradient is a dot product of ffn elements that SwiGLU's backward
already has, rather than of dim elements that would be kept for it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops import autograd
from titan_exp.ops.autograd import operator
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

GateUp = Float[Tensor, "rows two_ffn"]
Hidden = Float[Tensor, "rows ffn"]
Weights = Float[Tensor, " rows"]

GROUP = 32
"""Columns per group: gate and up columns alternate in groups of this many, so that tensor-parallel slices hold matching
halves of both."""
WIDE = (torch.float32, torch.float64)  # dtypes of products before they are rounded
CHUNK = 2**18  # elements of gate and up that a CPU thread processes at a time


def swiglu(
    gate_up: Float[Tensor, "*rows two_ffn"], group: int = GROUP, variant: SwiGLUVariant = SWIGLU
) -> Float[Tensor, "*rows ffn"]:
    """Compute silu(gate) · up or a variant, where `gate_up` alternates `group` gate columns and `group` up columns.
    Backward keeps `gate_up` alone; if that is small, SiLU's output too, as in `recompute_input`."""
    compiling = torch.compiler.is_compiling()
    if variant == SWIGLU and (compiling or gate_up.nbytes < autograd.RECOMPUTED_BYTES):
        # A compiler derives the same backward and fuses it; a small tensor's takes less time than a function of ours.
        gate, up = halves(gate_up, group)
        return (F.silu(gate if compiling else _packed(gate)) * up).flatten(-2)
    if compiling:
        return clamped_swiglu(gate_up, None, group, variant)
    return _SwiGLU.apply(gate_up, group, variant)  # type: ignore[return-value]  # a Tensor


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, group: int, variant: SwiGLUVariant) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.group, ctx.variant = group, variant
        return _swiglu(gate_up.contiguous(), None, group, **variant.numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        return _swiglu_backward(gate_up.contiguous(), gradient, ctx.group, **ctx.variant.numbers), None, None


@operator("swiglu", fake=lambda gate_up, *_, **__: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2))
def _swiglu(
    gate_up: Tensor, weights: Tensor | None, group: int, *, alpha: float, limit: float | None, offset: float
) -> Tensor:
    return swiglu_in_chunks(gate_up, weights, group, SwiGLUVariant(alpha, limit, offset))


@operator("swiglu_backward", fake=lambda gate_up, *_, **__: torch.empty_like(gate_up))
def _swiglu_backward(
    gate_up: Tensor, gradient: Tensor, group: int, *, alpha: float, limit: float | None, offset: float
) -> Tensor:
    return swiglu_backward_in_chunks(gate_up, None, gradient, group, SwiGLUVariant(alpha, limit, offset))[0]


def weighted_swiglu(gate_up: GateUp, weights: Weights, group: int = GROUP, variant: SwiGLUVariant = SWIGLU) -> Hidden:
    """Compute silu(gate) · up · weight or a variant, where `gate_up` alternates `group` gate columns and `group` up
    columns. The products are in fp32 and rounded once. Backward keeps only `gate_up` and `weights`."""
    if torch.compiler.is_compiling():
        if variant != SWIGLU:
            return clamped_swiglu(gate_up, weights, group, variant)
        gate, up = halves(gate_up, group)
        silu = F.silu(gate)
        product = silu.to(torch.promote_types(silu.dtype, torch.float32)) * up * weights.view(-1, 1, 1)
        return product.to(gate_up.dtype).flatten(-2)
    return _WeightedSwiGLU.apply(gate_up, weights, group, variant)  # type: ignore[return-value]  # a Tensor


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, group: int, variant: SwiGLUVariant) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.group, ctx.variant = group, variant
        return _swiglu(gate_up.contiguous(), weights.contiguous(), group, **variant.numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate_up, weights = ctx.saved_tensors
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        return *weighted_swiglu_backward(gate_up, weights, gradient, ctx.group, ctx.variant), None, None


def weighted_swiglu_backward(
    gate_up: GateUp, weights: Weights, gradient: Hidden, group: int = GROUP, variant: SwiGLUVariant = SWIGLU
) -> tuple[GateUp, Weights]:
    """Gradients of `gate_up` and `weights` from the output's contiguous gradient, which is overwritten with the
    output."""
    return _weighted_swiglu_backward(gate_up.contiguous(), weights.contiguous(), gradient, group, **variant.numbers)


@operator(
    "weighted_swiglu_backward",
    fake=lambda gate_up, weights, *_, **__: (torch.empty_like(gate_up), torch.empty_like(weights)),
    mutates_args=("gradient",),
)
def _weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, gradient: Tensor, group: int, *, alpha: float, limit: float | None, offset: float
) -> tuple[Tensor, Tensor]:
    variant = SwiGLUVariant(alpha, limit, offset)
    gate_up_grad, weights_grad = swiglu_backward_in_chunks(gate_up, weights, gradient, group, variant)
    assert weights_grad is not None, "weights are given"
    return gate_up_grad, weights_grad


def swiglu_in_chunks(gate_up: Tensor, weights: Tensor | None, group: int, variant: SwiGLUVariant) -> Tensor:
    """Compute silu(gate) · up [..., ffn] from the contiguous `gate_up` [..., 2 · ffn], times each row's weight if
    given. A `variant` changes the formula. The products are in at least fp32 and rounded once; SiLU is rounded
    before."""
    if variant == SWIGLU and weights is None and _rows_of_chunk(gate_up) >= gate_up.shape[:-1].numel():
        gate, up = halves(gate_up, group)
        return (F.silu(_packed(gate)) * up).flatten(-2)
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    for rows, fused, result in _chunks(gate_up, out):
        if variant != SWIGLU:
            result.copy_(clamped_swiglu(fused, None if weights is None else weights[rows], group, variant))
            continue
        gate, up = halves(fused, group)
        silu = F.silu(_packed(gate))
        if weights is None:
            torch.mul(silu, up, out=result.view_as(silu))
        else:
            torch.mul(_wide(silu).mul_(_wide(up)).view_as(result), weights[rows, None], out=result)
    return out


def swiglu_backward_in_chunks(
    gate_up: Tensor, weights: Tensor | None, gradient: Tensor, group: int, variant: SwiGLUVariant
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `gate_up`, and of `weights` if given, from the output's contiguous gradient. With `weights` it
    overwrites `gradient` with the output."""
    gate_up_grad = torch.empty_like(gate_up)
    weights_grad = None if weights is None else torch.empty_like(weights)
    for rows, fused, fused_grad, upstream in _chunks(gate_up, gate_up_grad, gradient):
        if variant != SWIGLU:
            part = None if weights is None else weights[rows]
            part_grad = clamped_swiglu_backward(fused, part, upstream, fused_grad, group, variant)
            if weights_grad is not None and part_grad is not None:
                weights_grad[rows] = part_grad
            continue
        (gate, up), (gate_grad, up_grad) = halves(fused, group), halves(fused_grad, group)
        gate, change = _packed(gate), upstream
        silu = F.silu(gate)
        if weights is not None and weights_grad is not None:
            silu, up, change = _wide(silu), _wide(up), _wide(upstream)
            weights_grad[rows], change = _weigh((silu * up).view_as(change), change, weights[rows, None], upstream)
        of_silu = change.view_as(silu)
        torch.mul(silu, of_silu, out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward((of_silu * up).to(gate.dtype), gate))
    return gate_up_grad, weights_grad


def _weigh(product: Tensor, change: Tensor, weights: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the weights and of the unweighted product; writes product times weights to `out`."""
    scratch = product * change
    weights_grad = scratch.sum(-1)
    # `out` may be `change`.
    torch.mul(change, weights, out=scratch)
    torch.mul(product, weights, out=out)
    return weights_grad, scratch


def _packed(gate: Tensor) -> Tensor:
    """Gates in a layout that torch's SiLU reads fast."""
    return gate if gate.dtype in WIDE else gate.contiguous()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in WIDE else tensor.float()


def _rows_of_chunk(rows: Tensor) -> int:
    """Number of rows that fit the caches of a CPU's threads; all rows on a GPU, and in the planner, which would trace
    every chunk."""
    if rows.is_cuda or isinstance(rows, FakeTensor):
        return max(1, rows.shape[:-1].numel())
    return max(1, CHUNK * torch.get_num_threads() // max(1, rows.shape[-1]))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield slices of rows, and these rows of each tensor, as many as fit a chunk of the first tensor."""
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    count, size = rows[0].shape[0], _rows_of_chunk(rows[0])
    for start in range(0, count, size):
        chunk = slice(start, start + size)
        yield chunk, *(tensor[chunk] for tensor in rows)


def halves(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Split [rows, 2 · ffn] into gate and up columns [rows, ffn / group, group]."""
    gate, up = gate_up.unflatten(-1, (-1, 2, group)).unbind(-2)
    return gate, up


def clamped_swiglu(gate_up: Tensor, weights: Tensor | None, group: int, variant: SwiGLUVariant) -> Tensor:
    """Compute a variant of SwiGLU, times `weights`; `gate_up` alternates `group` gate columns and `group` up
    columns."""
    gate, up = _clamped(gate_up, variant, group)
    out = up * gate * (variant.alpha * gate).sigmoid()
    out = out if weights is None else out * weights[:, None, None]
    return out.to(gate_up.dtype).flatten(-2)


def clamped_swiglu_backward(  # noqa: PLR0917  # as of `clamped_swiglu`
    gate_up: Tensor, weights: Tensor | None, gradient: Tensor, gate_up_grad: Tensor, group: int, variant: SwiGLUVariant
) -> Tensor | None:
    """Write the gradient of `gate_up`. If `weights` are given, return their gradient and overwrite `gradient` with the
    output."""
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
    """Clamp gate and up to their limits, and add up's offset, in fp32 at least."""
    gate, up = halves(gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)), group)
    if variant.limit is not None:
        gate, up = gate.clamp(max=variant.limit), up.clamp(-variant.limit, variant.limit)
    return gate, up + variant.offset
