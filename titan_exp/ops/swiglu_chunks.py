"""SwiGLU by torch's operators in chunks of rows: on a CPU, passes over memory and page faults cost most.

Gates in bf16 are made contiguous first: torch's SiLU of groups of 32 columns takes five times as long.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.clamped_swiglu import clamped_swiglu, clamped_swiglu_backward, halves
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant

CHUNK = 2**18
"""Gates and ups that a thread of a CPU has at a time."""


def swiglu_in_chunks(gate_up: Tensor, weights: Tensor | None, group: int, variant: SwiGLUVariant) -> Tensor:
    """silu(gate) · up [..., ffn] of the contiguous `gate_up` [..., 2 · ffn], times the weight of each row if given.

    Or a variant of it. The products are in at least fp32 and rounded once; SiLU is rounded before.
    """
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    for rows, fused, result in _chunks(gate_up, out):
        if variant != SWIGLU:
            result.copy_(clamped_swiglu(fused, None if weights is None else weights[rows], group, variant))
            continue
        gate, up = halves(fused, group)
        product = _wide(F.silu(_packed(gate))).mul_(_wide(up)).view_as(result)
        torch.mul(product, 1 if weights is None else weights[rows, None], out=result)
    return out


def swiglu_backward_in_chunks(
    gate_up: Tensor, weights: Tensor | None, gradient: Tensor, group: int, variant: SwiGLUVariant
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `gate_up`, and of `weights` if given, from the contiguous one of the output.

    With `weights` it overwrites `gradient` with the output.
    """
    gate_up_grad = torch.empty_like(gate_up)
    weights_grad = None if weights is None else torch.empty_like(weights)
    for rows, fused, fused_grad, upstream in _chunks(gate_up, gate_up_grad, gradient):
        if variant != SWIGLU:
            part = None if weights is None else weights[rows]
            part_grad = clamped_swiglu_backward(fused, part, upstream, fused_grad, group, variant)
            if weights_grad is not None and part_grad is not None:
                weights_grad[rows] = part_grad
            continue
        (narrow_gate, narrow_up), (gate_grad, up_grad) = halves(fused, group), halves(fused_grad, group)
        gate, up, change = _packed(narrow_gate), _wide(narrow_up), _wide(upstream)
        silu = _wide(F.silu(gate))
        if weights is not None and weights_grad is not None:
            weights_grad[rows], change = _weigh((silu * up).view_as(change), change, weights[rows, None], upstream)
        of_silu = change.view_as(silu)
        torch.mul(silu, of_silu, out=up_grad)
        gate_grad.copy_(torch.ops.aten.silu_backward((of_silu * up).to(gate.dtype), gate))
    return gate_up_grad, weights_grad


def _weigh(product: Tensor, change: Tensor, weights: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weights and of the product without them; writes the product times weights to `out`."""
    scratch = product * change
    weights_grad = scratch.sum(-1)
    # `out` may be `change`.
    torch.mul(change, weights, out=scratch)
    torch.mul(product, weights, out=out)
    return weights_grad, scratch


def _packed(gate: Tensor) -> Tensor:
    """Gates that torch's SiLU reads fast."""
    return gate if gate.dtype == torch.promote_types(gate.dtype, torch.float32) else gate.contiguous()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _chunks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Slices of rows, and those rows of each tensor: as many as fit the caches of a CPU's threads.

    All rows on a GPU, and in the planner, which would trace every chunk.
    """
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    count, width = rows[0].shape
    whole = rows[0].is_cuda or isinstance(rows[0], FakeTensor)
    size = count if whole else CHUNK * torch.get_num_threads() // max(1, width)
    for start in range(0, count, max(1, size)):
        chunk = slice(start, start + max(1, size))
        yield chunk, *(tensor[chunk] for tensor in rows)
