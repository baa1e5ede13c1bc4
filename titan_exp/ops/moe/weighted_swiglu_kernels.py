"""Triton kernels of `ops.moe.weighted_swiglu`, in a separate file because importing it needs Triton.

A program has `side` whole rows, `block` columns at a time. Results are rounded as in `ops.swiglu_kernels`.
"""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded
from titan_exp.ops.swiglu_kernels import gated, gated_gradients


@triton.jit
def weighted_swiglu_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate_up: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    ffn: tl.tensor,
    group: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    side: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute rows of (up + offset) · gate · sigmoid(alpha · gate) · weight."""
    row = tl.program_id(0).to(tl.int64) * side + tl.arange(0, side)
    weight = tl.load(weights + row, mask=row < rows, other=0.0)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    for start in range(0, ffn, block):  # type: ignore[arg-type]  # a loop of Triton
        inside, offsets, gates = _columns(row, rows, ffn, start, group, block)  # type: ignore[misc]  # a tuple in a kernel
        gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
        _, up, _, swish = gated(gate, up, dtype, alpha, limit, offset)  # type: ignore[misc]
        tl.store(out + offsets, rounded(swish * up * weight, dtype), mask=inside)


@triton.jit
def weighted_swiglu_backward_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    gate_up: tl.tensor,
    weights: tl.tensor,
    gradient: tl.tensor,
    gate_up_grad: tl.tensor,
    weights_grad: tl.tensor,
    rows: tl.tensor,
    ffn: tl.tensor,
    group: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    side: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute gradients of gate, up and weight for rows of the output's gradient, and overwrite it with the output."""
    row = tl.program_id(0).to(tl.int64) * side + tl.arange(0, side)
    weight = tl.load(weights + row, mask=row < rows, other=0.0)[:, None]
    dtype: tl.constexpr = gate_up.dtype.element_ty  # type: ignore[attr-defined]  # pointers have it
    products = tl.zeros((side, block), tl.float32)
    for start in range(0, ffn, block):  # type: ignore[arg-type]  # a loop of Triton
        inside, offsets, gates = _columns(row, rows, ffn, start, group, block)  # type: ignore[misc]  # a tuple in a kernel
        gate = tl.load(gate_up + gates, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gates + group, mask=inside, other=0.0).to(tl.float32)
        change = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
        _, shifted, _, swish = gated(gate, up, dtype, alpha, limit, offset)  # type: ignore[misc]
        product = swish * shifted
        tl.store(gradient + offsets, rounded(product * weight, dtype), mask=inside)
        products += change * product
        of_gate, of_up = gated_gradients(gate, up, change * weight, dtype, alpha, limit, offset)  # type: ignore[misc]
        tl.store(gate_up_grad + gates, rounded(of_gate, dtype), mask=inside)
        tl.store(gate_up_grad + gates + group, rounded(of_up, dtype), mask=inside)
    tl.store(weights_grad + row, tl.sum(products, 1), mask=row < rows)


@triton.jit
def _columns(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    row: tl.tensor, rows: tl.tensor, ffn: tl.tensor, start: tl.tensor, group: tl.constexpr, block: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor, tl.tensor]":
    """Mask of a tile of the output, its offsets, and those of its gates."""
    column = start + tl.arange(0, block)
    inside = (row < rows)[:, None] & (column < ffn)[None, :]
    offsets = row[:, None] * ffn + column[None, :]
    return inside, offsets, row[:, None] * (2 * ffn) + (column + column // group * group)[None, :]
