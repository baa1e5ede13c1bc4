"""Grouped linear layer of weighted SwiGLU: the second half of an expert.

Backward keeps SwiGLU's input. The gradient of the linear weight needs SwiGLU's output too: its backward, which has the
factors at hand, writes it over its upstream gradient.
"""

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from titan_exp.ops.moe.grouped_mm import grouped_linear, grouped_outer, grouped_rows
from titan_exp.ops.moe.weighted_swiglu import weighted_swiglu, weighted_swiglu_backward
from titan_exp.ops.needs_input_grad import needs_input_grad
from titan_exp.ops.swiglu import GROUP
from titan_exp.ops.swiglu_variant import SWIGLU, SwiGLUVariant


def weighted_swiglu_linear(
    gate_up: Float[Tensor, "rows two_ffn"],
    weight: Float[Tensor, "experts dim ffn"],
    row_weights: Float[Tensor, " rows"],
    ends: Int32[Tensor, " experts"],
    group: int = GROUP,
    *,
    variant: SwiGLUVariant = SWIGLU,
) -> Float[Tensor, "rows dim"]:
    """`grouped_linear` of `weighted_swiglu`: each row's silu(gate) · up · weight by its expert's matrix."""
    if torch.compiler.is_compiling():
        # The partitioner recomputes what is cheap.
        return grouped_linear(weighted_swiglu(gate_up, row_weights, group, variant), weight, ends)
    return _WeightedSwiGLULinear.apply(gate_up, weight, row_weights, ends, group, variant)  # type: ignore[return-value]  # a Tensor


class _WeightedSwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        row_weights: Tensor,
        ends: Tensor,
        group: int,
        variant: SwiGLUVariant,
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
