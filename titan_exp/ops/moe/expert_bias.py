"""Bias of experts: to each row that of its expert, rows sorted by expert, times the weight of the row if given.

The gradient of a bias sums the rows of an expert by a grouped matmul with ones or weights: one order, no atomics.
"""

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from titan_exp.ops.moe.grouped_mm import ALIGNED, grouped_outer
from titan_exp.ops.needs_input_grad import needs_input_grad


def add_expert_bias(
    rows: Float[Tensor, "rows width"],
    bias: Float[Tensor, "experts width"],
    ends: Int32[Tensor, " experts"],
    weights: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows width"]:
    """rows + weight · bias[expert], in the dtype of `rows`.

    `ends` are the ends of the experts' rows. Rows after the last end stay as they are.
    """
    return _AddExpertBias.apply(rows, bias, ends, weights)  # type: ignore[return-value]  # a Tensor


def _bias_of_rows(bias: Tensor, ends: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    expert = torch.searchsorted(ends, row, right=True)
    # One more expert, of the rows after the last end.
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1])))[expert]


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
        # The bias is read for the gradient of weights only.
        ctx.save_for_backward(None if weights is None else bias, ends, weights)
        ctx.dtype = bias.dtype
        added = _bias_of_rows(bias, ends, rows.shape[0])
        return rows + (added if weights is None else added * weights[:, None]).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        bias, ends, weights = ctx.saved_tensors
        gradient, bias_grad, weights_grad = gradients[0], None, None
        rows = gradient.shape[0]
        if needs_input_grad(ctx)[1]:
            factor = gradient.new_ones(rows) if weights is None else weights.to(gradient.dtype)
            # The kernel takes several columns at least.
            bias_grad = grouped_outer(gradient, factor[:, None].expand(-1, ALIGNED), ends)[..., 0].to(ctx.dtype)
        if weights is not None:
            weights_grad = (gradient.to(weights.dtype) * _bias_of_rows(bias, ends, rows)).sum(-1)
        return gradient, bias_grad, None, weights_grad
