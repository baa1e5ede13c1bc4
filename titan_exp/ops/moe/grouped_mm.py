"""Grouped matmul of experts: multiplies each row of a matrix, sorted by expert, by the weight of its expert.

On CUDA in bf16 it is torch's grouped matmul, a single kernel that reads the group ends on the device. On a CPU it is
torch's too, in bf16 and fp32. Otherwise it is a loop over experts. Both of these read the ends on the host, which
synchronizes a GPU, as does torch's kernel before Hopper.

The linear layer of weighted SwiGLU is the second half of an expert. Its backward keeps SwiGLU's input. The gradient of
the weight also needs SwiGLU's output, which SwiGLU's backward can compute on the way and write over its upstream
gradient.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.autograd import needs_input_grad, operator
from titan_exp.ops.swiglu import GROUP, weighted_swiglu, weighted_swiglu_backward
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant
from titan_exp.ops.triton_kernels import jit, runs_kernel, tl

Ends = Int32[Tensor, " experts"]
Rows = Float[Tensor, "rows width"]
RowWeights = Float[Tensor, " rows"]

ALIGNED = 8  # multiple that torch's kernel requires of dims, because each bf16 row must start on 16 bytes
PROGRAMS = 1024  # number of kernel programs that zero the rows of no expert


def grouped_linear(
    x: Float[Tensor, "tokens dim_in"], weight: Float[Tensor, "experts dim_out dim_in"], ends: Ends
) -> Float[Tensor, "tokens dim_out"]:
    """Compute x · weight[expert]ᵀ row by row, differentiable in both. `x` is sorted by expert; `ends`, ascending, are
    the ends of each expert's rows; an expert may have none. Rows after the last end give zeros and no gradient. Raises
    ValueError if `ends` do not ascend or exceed the rows; only if read on the host."""
    return _GroupedLinear.apply(x, weight, ends)  # type: ignore[return-value]  # a Tensor


def grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x [tokens, k] by weight[expert] [experts, k, n], without gradients: [tokens, n], zeros after the last
    end."""
    if not torch.compiler.is_compiling() or not _has_kernel(x, weight):
        return _grouped_rows(x, weight, ends)
    # The compiler knows torch's operator, and fuses the mask into the next one.
    row = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return F.grouped_mm(x.contiguous(), weight, offs=ends).masked_fill(row[:, None] >= ends[-1], 0)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Multiply leftᵀ [tokens, m] by right [tokens, n] per expert, without gradients: [experts, m, n]."""
    if not _has_kernel(left, right):
        return _loop_outer(left, right, ends)
    return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_rows(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        x_grad = grouped_rows(gradients[0], weight, ends) if needs_x_grad else None
        weight_grad = grouped_outer(gradients[0], x, ends) if needs_weight_grad else None
        return x_grad, weight_grad, None


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    return left.is_cuda and left.dtype == torch.bfloat16 and _is_taken(left, right)


def _is_taken(left: Tensor, right: Tensor) -> bool:
    """True if torch's grouped matmul takes these operands, on a GPU only those in bf16."""
    aligned = all(size % ALIGNED == 0 for size in (left.shape[-1], right.shape[-1]))
    return aligned and left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float32)


@operator("grouped_rows", fake=lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))
def _grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, weight):
        out = F.grouped_mm(x.contiguous(), weight, offs=ends)
        # The kernel leaves rows after the last end uninitialized.
        _zero_rows_after(out, ends)
        return out
    sizes = sizes_of_experts(ends, x.shape[0])
    if x.is_cpu and _is_taken(x, weight) and (weight.is_contiguous() or weight.mT.is_contiguous()):
        out = F.grouped_mm(x.contiguous(), weight, offs=ends)
    else:
        out = x.new_empty(x.shape[0], weight.shape[2])
        of_experts = out.split_with_sizes(sizes), x.split_with_sizes(sizes), weight.unbind()
        for part, rows, matrix in zip(*of_experts, strict=False):
            if rows.shape[0]:
                torch.mm(rows, matrix, out=part)
    if sizes[-1]:
        out[-sizes[-1] :].zero_()
    return out


def _empty_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


@operator("grouped_outer", fake=_empty_outer)
def _loop_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    sizes = sizes_of_experts(ends, left.shape[0])
    if left.is_cpu and _is_taken(left, right):
        return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)
    out = _empty_outer(left, right, ends)
    of_experts = out.unbind(), left.split_with_sizes(sizes), right.split_with_sizes(sizes)
    for part, rows, columns in zip(*of_experts, strict=False):
        if rows.shape[0]:
            torch.mm(rows.t(), columns, out=part)
        else:
            part.zero_()
    return out


def _zero_rows_after(rows: Tensor, ends: Tensor) -> None:
    """Zero the rows after the last end. Usually there are none, and masking would read and write all rows."""
    if not runs_kernel(rows):
        row = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
        rows.masked_fill_(row[:, None] >= ends[-1], 0)
    elif rows.numel():
        grid = (min(rows.shape[0], PROGRAMS),)
        zero_rows_after_kernel[grid](rows, ends, *rows.shape, ends.shape[0] - 1, programs=PROGRAMS, block=1024)


@jit
def zero_rows_after_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    out: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    last: tl.tensor,
    programs: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Zero this program's share of the `rows` rows after `ends[last]`."""
    first = tl.load(ends + last).to(tl.int64) + tl.program_id(0)
    for row in range(first, rows, programs):  # type: ignore[arg-type]  # a loop of Triton
        for start in range(0, width, block):  # type: ignore[arg-type]  # a loop of Triton
            column = start + tl.arange(0, block)
            zeros = tl.zeros((block,), out.dtype.element_ty)  # type: ignore[attr-defined]  # pointers have it
            tl.store(out + row * width + column, zeros, mask=column < width)


def sizes_of_experts(ends: Tensor, tokens: int) -> list[int]:
    """Number of rows of each expert, then of the rest. Fake tensors have no values, so their experts get equal
    numbers."""
    experts = ends.shape[0]
    known = (
        [tokens * (expert + 1) // experts for expert in range(experts)] if type(ends) is FakeTensor else ends.tolist()
    )
    for expert, (start, end) in enumerate(pairwise([0, *known])):
        if not start <= end <= tokens:
            raise ValueError(f"rows of expert {expert} end at {end}, which must be between {start} and {tokens}")
    return [end - start for start, end in pairwise([0, *known, tokens])]


def runs_of_experts(ends: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, with its rows."""
    start = 0
    for expert, size in enumerate(sizes_of_experts(ends, tokens)[:-1]):
        if size:
            yield expert, slice(start, start + size)
        start += size


def weighted_swiglu_linear(
    gate_up: Float[Tensor, "rows two_ffn"],
    weight: Float[Tensor, "experts dim ffn"],
    row_weights: RowWeights,
    ends: Ends,
    group: int = GROUP,
    *,
    variant: SwiGLUVariant = SWIGLU,
) -> Float[Tensor, "rows dim"]:
    """Apply `grouped_linear` to `weighted_swiglu`: multiply each row's silu(gate) · up · weight by its expert's
    matrix."""
    if torch.compiler.is_compiling():
        # The partitioner recomputes cheap operators.
        return grouped_linear(weighted_swiglu(gate_up, row_weights, group, variant), weight, ends)
    return _WeightedSwiGLULinear.apply(gate_up, weight, row_weights, ends, group, variant)  # type: ignore[return-value]  # a Tensor


class _WeightedSwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any, gate_up: Tensor, weight: Tensor, row_weights: Tensor, ends: Tensor, group: int, variant: SwiGLUVariant
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weight, row_weights, ends)
        ctx.how = group, variant
        return grouped_rows(weighted_swiglu(gate_up, row_weights, group, variant), weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate_up, weight, row_weights, ends = ctx.saved_tensors
        needs_gate_up_grad, needs_weight_grad, needs_row_weights_grad = needs_input_grad(ctx, 3)
        hidden, gate_up_grad, weight_grad, row_weights_grad = None, None, None, None
        if needs_gate_up_grad or needs_row_weights_grad:
            hidden = grouped_rows(gradients[0], weight, ends)
            gate_up_grad, row_weights_grad = weighted_swiglu_backward(gate_up, row_weights, hidden, *ctx.how)
        if needs_weight_grad:
            if hidden is None:
                hidden = weighted_swiglu(gate_up, row_weights, *ctx.how)
            weight_grad = grouped_outer(gradients[0], hidden, ends)
        return gate_up_grad, weight_grad, row_weights_grad, None, None, None


def add_expert_bias(
    rows: Rows, bias: Float[Tensor, "experts width"], ends: Ends, weights: RowWeights | None = None
) -> Rows:
    """Compute rows + weight · bias[expert], in the dtype of `rows`, which are sorted by expert. `ends` are the ends of
    the experts' rows. Rows after the last end stay as they are. A bias's gradient sums an expert's rows in order,
    without atomics."""
    return _AddExpertBias.apply(rows, bias, ends, weights)  # type: ignore[return-value]  # a Tensor


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
        # The bias is read for the gradient of weights only.
        ctx.save_for_backward(None if weights is None else bias, ends, weights)
        ctx.dtype = bias.dtype
        if torch.compiler.is_compiling() or rows.is_cuda:
            # The compiler fuses this with later operators, and no end comes to the host.
            added = _bias_of_rows(bias, ends, rows.shape[0])
            return rows + (added if weights is None else added * weights[:, None]).to(rows.dtype)
        return _add_bias(rows.contiguous(), bias, ends, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (bias, ends, weights), gradient = ctx.saved_tensors, gradients[0]
        needs_bias_grad, bias_grad, weights_grad = needs_input_grad(ctx)[1], None, None
        if needs_bias_grad or weights is not None:
            backward = bias_backward_without_ends if gradient.is_cuda else _bias_backward
            bias_grad, weights_grad = backward(gradient.contiguous(), bias, ends, weights)
        return (
            gradient,
            bias_grad.to(ctx.dtype) if bias_grad is not None and needs_bias_grad else None,
            None,
            None if weights is None else weights_grad,
        )


def bias_backward_without_ends(
    gradient: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute `_bias_backward` by torch's grouped matmul, so that no end comes to the host."""
    scaled = gradient if weights is None else (gradient * weights[:, None]).to(gradient.dtype)
    # The sum is a product with ones; the kernel requires a few columns of them.
    bias_grad = grouped_outer(gradient.new_ones(gradient.shape[0], ALIGNED), scaled, ends)[:, 0]
    if bias is None or weights is None:
        return bias_grad, None
    return bias_grad, (gradient * _bias_of_rows(bias, ends, gradient.shape[0]).to(weights.dtype)).sum(-1)


def _bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, row, right=True)
    # One more expert stands for the rows after the last end.
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1])))[expert]


@operator("add_expert_bias", fake=lambda rows, *_: torch.empty_like(rows))
def _add_bias(rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    out = rows.clone()
    for expert, part in runs_of_experts(ends, rows.shape[0]):
        added = bias[expert] if weights is None else bias[expert] * weights[part, None]
        out[part].add_(added.to(rows.dtype))
    return out


@operator("expert_bias_backward")
def _bias_backward(
    gradient: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the bias, in fp32 at least, and of weights; `bias` and `weights` are given together."""
    bias_grad, weights_grad = _empty_gradients(gradient, bias, ends, weights)
    bias_grad.zero_()
    weights_grad.zero_()
    for expert, part in runs_of_experts(ends, gradient.shape[0]):
        upstream = gradient[part].to(bias_grad.dtype)
        factors = upstream.new_ones(upstream.shape[0]) if weights is None else weights[part].to(upstream.dtype)
        torch.mv(upstream.t(), factors, out=bias_grad[expert])
        if bias is not None:
            weights_grad[part] = (upstream @ bias[expert].to(upstream.dtype)).to(weights_grad.dtype)
    return bias_grad, weights_grad


@torch.library.register_fake("titan_exp::expert_bias_backward")
def _empty_gradients(
    gradient: Tensor, bias: Tensor | None, ends: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    bias_grad = gradient.new_empty(ends.shape[0], gradient.shape[1], dtype=wide)
    return bias_grad, bias_grad.new_empty(0) if weights is None else torch.empty_like(weights)
