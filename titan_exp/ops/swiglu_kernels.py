"""Triton kernels of `ops.swiglu`, in a separate file because importing it needs Triton.

Results of plain SwiGLU are rounded where torch's operators round theirs: SiLU before the product, and the gradient of
SiLU's output before that of its input. Variants are rounded once.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def swiglu_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate_up: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    group: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute `block` of the `size` numbers of (up + offset) · gate · sigmoid(alpha · gate)."""
    start, column, inside, gates = _columns(size, group, block)  # type: ignore[misc]  # returns a tuple in a kernel
    gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    _, up, _, swish = gated(gate, up, dtype, alpha, limit, offset)  # type: ignore[misc]
    tl.store(out + start + column, rounded(swish * up, dtype), mask=inside)


@triton.jit
def swiglu_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate_up: tl.tensor,
    gradient: tl.tensor,
    gate_up_grad: tl.tensor,
    size: tl.tensor,
    group: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute gradients of gate and up from `block` of the `size` numbers of the output's gradient."""
    start, column, inside, gates = _columns(size, group, block)  # type: ignore[misc]
    gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(gradient + start + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_up.dtype.element_ty  # type: ignore[attr-defined]
    of_gate, of_up = gated_gradients(gate, up, change, dtype, alpha, limit, offset)  # type: ignore[misc]
    tl.store(gate_up_grad + gates, rounded(of_gate, dtype), mask=inside)
    tl.store(gate_up_grad + gates + group, rounded(of_up, dtype), mask=inside)


@triton.jit
def gated(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate: tl.tensor,
    up: tl.tensor,
    dtype: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]":
    """Clamped gate, clamped up plus offset, sigmoid(alpha · gate), and gate times it, in fp32. NaN stays."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if offset != 0:
        up += offset
    below = 1 + tl.exp(-alpha * gate)
    swish = gate / below
    if limit is None and offset == 0 and alpha == 1:
        swish = rounded(swish, dtype).to(tl.float32)
    return gate, up, 1 / below, swish


@triton.jit
def gated_gradients(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate: tl.tensor,
    up: tl.tensor,
    change: tl.tensor,
    dtype: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
) -> "tuple[tl.tensor, tl.tensor]":
    """Gradients of gate and up from that of their product, in fp32; none passes a limit."""
    within, shifted, sigmoid, swish = gated(gate, up, dtype, alpha, limit, offset)  # type: ignore[misc]
    of_swish, of_up = change * shifted, change * swish
    if limit is None and offset == 0 and alpha == 1:
        of_swish = rounded(of_swish, dtype).to(tl.float32)
    of_gate = of_swish * sigmoid * (1 + alpha * within * (1 - sigmoid))
    if limit is not None:
        of_gate = tl.where(gate > limit, 0.0, of_gate)
        of_up = tl.where(tl.abs(up) > limit, 0.0, of_up)
    return of_gate, of_up


@triton.jit
def _columns(
    size: tl.tensor, group: tl.constexpr, block: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]":
    """This program's first number of the output, the others after it, those that exist, and their gates' offsets."""
    start = tl.program_id(0).to(tl.int64) * block
    column = tl.arange(0, block)
    # One division in 64 bits per program, the others in 32.
    groups = start // group
    after = (start - groups * group).to(tl.int32) + column
    gates = start + groups * group + (column + after // group * group)
    return start, column, column < tl.minimum(size - start, block), gates
