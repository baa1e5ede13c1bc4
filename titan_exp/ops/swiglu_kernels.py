"""Triton kernels of `ops.swiglu`, in a separate file because importing it needs Triton.

Results are rounded where torch's operators round theirs: SiLU before the product, and the gradient of SiLU's output
before that of its input.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def swiglu_kernel(
    gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, group: tl.constexpr, block: tl.constexpr
) -> None:
    """Compute `block` of the `size` numbers of silu(gate) · up."""
    start, column, inside, gates = _columns(size, group, block)  # type: ignore[misc]  # returns a tuple in a kernel
    gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    silu = rounded(gate / (1 + tl.exp(-gate)), dtype).to(tl.float32)
    tl.store(out + start + column, rounded(silu * up, dtype), mask=inside)


@triton.jit
def swiglu_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate_up: tl.tensor,
    gradient: tl.tensor,
    gate_up_grad: tl.tensor,
    size: tl.tensor,
    group: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute gradients of gate and up from `block` of the `size` numbers of the output's gradient."""
    start, column, inside, gates = _columns(size, group, block)  # type: ignore[misc]
    gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(gradient + start + column, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_up.dtype.element_ty  # type: ignore[attr-defined]
    below = 1 + tl.exp(-gate)
    sigmoid, silu = 1 / below, rounded(gate / below, dtype).to(tl.float32)
    of_silu = rounded(change * up, dtype).to(tl.float32)
    of_gate = of_silu * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up_grad + gates, rounded(of_gate, dtype), mask=inside)
    tl.store(gate_up_grad + gates + group, rounded(change * silu, dtype), mask=inside)


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
