"""Grouped matmul of experts: each row of a matrix by the weight of its expert, rows sorted by expert.

On CUDA in bf16 it is torch's grouped matmul, one kernel that reads the group ends on the device. Otherwise it is a loop
over experts that reads the ends on the host, which synchronizes a GPU; so does torch's kernel before Hopper.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.ops.runs_kernel import runs_kernel

ALIGNED = 8
"""Multiple that torch's kernel requires of dims: bf16 rows start every 16 bytes."""
PROGRAMS = 1024
"""Kernel programs that share the rows of no expert."""


def grouped_linear(
    x: Float[Tensor, "tokens dim_in"],
    weight: Float[Tensor, "experts dim_out dim_in"],
    ends: Int32[Tensor, " experts"],
) -> Float[Tensor, "tokens dim_out"]:
    """x · weight[expert]ᵀ row by row, differentiable in both.

    `x` is sorted by expert; `ends`, ascending, are the ends of each expert's rows, of which there may be none. Rows
    after the last end give zeros and no gradient.

    Raises:
        ValueError: `ends` do not ascend or exceed the rows; only if read on the host.
    """
    return _GroupedLinear.apply(x, weight, ends)  # type: ignore[return-value]  # a Tensor


def grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [tokens, k] · weight[expert] [experts, k, n] without gradients: [tokens, n], zeros after the last end."""
    if not torch.compiler.is_compiling() or not _has_kernel(x, weight):
        return _grouped_rows(x, weight, ends)
    # The compiler knows torch's operator, and fuses the mask into the next one.
    row = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return F.grouped_mm(x.contiguous(), weight, offs=ends).masked_fill(row[:, None] >= ends[-1], 0)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """leftᵀ [tokens, m] · right [tokens, n] per expert without gradients: [experts, m, n]."""
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
    return (
        left.is_cuda
        and left.dtype == right.dtype == torch.bfloat16
        and all(size % ALIGNED == 0 for size in (left.shape[-1], *right.shape[1:]))
    )


@torch.library.custom_op("titan_exp::grouped_rows", mutates_args=())
def _grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, weight):
        out = F.grouped_mm(x.contiguous(), weight, offs=ends)
        # The kernel leaves rows after the last end uninitialized.
        _zero_rows_after(out, ends)
        return out
    out = _empty_rows(x, weight, ends)
    last = 0
    for expert, rows in runs_of_experts(ends, x.shape[0]):
        torch.mm(x[rows], weight[expert], out=out[rows])
        last = rows.stop
    out[last:] = 0
    return out


@torch.library.custom_op("titan_exp::grouped_outer", mutates_args=())
def _loop_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    out = _empty_outer(left, right, ends)
    for expert, rows in runs_of_experts(ends, left.shape[0]):
        torch.mm(left[rows].t(), right[rows], out=out[expert])
    for expert in (ends.diff(prepend=ends.new_zeros(1)) == 0).nonzero().flatten().tolist():
        out[expert] = 0
    return out


@_grouped_rows.register_fake
def _empty_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_loop_outer.register_fake
def _empty_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _zero_rows_after(rows: Tensor, ends: Tensor) -> None:
    """Zero the rows after the last end; usually there are none, and masking would read and write all of them."""
    if not runs_kernel(rows):
        row = torch.arange(rows.shape[0], device=rows.device, dtype=ends.dtype)
        rows.masked_fill_(row[:, None] >= ends[-1], 0)
    elif rows.numel():
        from titan_exp.ops.moe.permutation_kernels import zero_rows_after_kernel

        launch: Any = zero_rows_after_kernel[(min(rows.shape[0], PROGRAMS),)]
        launch(rows, ends, *rows.shape, ends.shape[0] - 1, programs=PROGRAMS, block=1024)


def runs_of_experts(ends: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, with their rows; of fake tensors, which have no values, equally many."""
    start, experts = 0, ends.shape[0]
    known = (
        [tokens * (expert + 1) // experts for expert in range(experts)] if type(ends) is FakeTensor else ends.tolist()
    )
    for expert, end in enumerate(known):
        if not start <= end <= tokens:
            raise ValueError(f"rows of expert {expert} end at {end}, after {start}: ends ascend, to at most {tokens}")
        if end > start:
            yield expert, slice(start, end)
        start = end
