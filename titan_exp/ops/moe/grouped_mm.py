"""The product of experts: every row of a matrix by the weight of the expert that it was sent to, rows sorted by expert.

On CUDA torch's grouped matmul computes it in bf16: one kernel for all experts, which reads on the device where their
rows end. Elsewhere it is a loop over experts, which reads that on the host: a CPU waits for nothing by it; a GPU does,
in other types or where a dim is no multiple of 8, and so does torch's own kernel on GPUs older than Hopper.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int32
from torch import Tensor

from titan_exp.ops.needs_input_grad import needs_input_grad

ALIGNED = 8
"""What dims are multiples of for torch's kernel: rows of bf16 begin every 16 bytes."""


def grouped_linear(
    x: Float[Tensor, "tokens dim_in"],
    weight: Float[Tensor, "experts dim_out dim_in"],
    ends: Int32[Tensor, " experts"],
) -> Float[Tensor, "tokens dim_out"]:
    """x · weight[expert]ᵀ, row by row, with gradients of both.

    Args:
        x: rows sorted by expert.
        weight: the experts' weights, of the type of `x`.
        ends: where the rows of each expert end and the next one's begin, ascending and at most `tokens`. An expert may
            have none. Rows from the last end on belong to no expert: they give zeros and no gradient.

    Raises:
        ValueError: ends do not ascend, or are beyond the rows; only where the host reads them.
    """
    return _GroupedLinear.apply(x, weight, ends)  # type: ignore[return-value]  # a Tensor


def grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x · weight[expert], row by row, without gradients; zeros from the last end on.

    Args:
        x: [tokens, k].
        weight: [experts, k, n].
        ends: as of `grouped_linear`.

    Returns:
        [tokens, n]
    """
    if not _has_kernel(x, weight):
        return _rows_in_a_loop(x, weight, ends)
    product = F.grouped_mm(x.contiguous(), weight, offs=ends)
    # The kernel leaves there what was in memory before.
    row = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return product.masked_fill(row[:, None] >= ends[-1], 0)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """leftᵀ · right of each expert's rows, without gradients; zeros for an expert that has none.

    Args:
        left: [tokens, m].
        right: [tokens, n].
        ends: as of `grouped_linear`.

    Returns:
        [experts, m, n]
    """
    if not _has_kernel(left, right):
        return _outer_in_a_loop(left, right, ends)
    return F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_rows(x, weight.mT, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, ends = ctx.saved_tensors
        wants_x, wants_weight = needs_input_grad(ctx)
        of_x = grouped_rows(gradients[0], weight, ends) if wants_x else None
        of_weight = grouped_outer(gradients[0], x, ends) if wants_weight else None
        return of_x, of_weight, None


def _has_kernel(left: Tensor, right: Tensor) -> bool:
    return (
        left.is_cuda
        and left.dtype == right.dtype == torch.bfloat16
        and all(size % ALIGNED == 0 for size in (left.shape[-1], *right.shape[1:]))
    )


@torch.library.custom_op("titan_exp::grouped_rows", mutates_args=())
def _rows_in_a_loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    product = _rows_made(x, weight, ends)
    last = 0
    for expert, rows in _runs(ends, x.shape[0]):
        torch.mm(x[rows], weight[expert], out=product[rows])
        last = rows.stop
    product[last:] = 0
    return product


@torch.library.custom_op("titan_exp::grouped_outer", mutates_args=())
def _outer_in_a_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    product = _outer_made(left, right, ends).zero_()
    for expert, rows in _runs(ends, left.shape[0]):
        torch.mm(left[rows].t(), right[rows], out=product[expert])
    return product


@_rows_in_a_loop.register_fake
def _rows_made(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_outer_in_a_loop.register_fake
def _outer_made(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _runs(ends: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """Every expert that has rows, and which those are."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if not start <= end <= tokens:
            raise ValueError(f"rows of expert {expert} end at {end}, after {start}: ends ascend, to at most {tokens}")
        if end > start:
            yield expert, slice(start, end)
        start = end
