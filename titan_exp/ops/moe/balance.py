"""Losses that balance experts, in a form that no layout changes, and counts of tokens per expert.

With the share f of choices known over a whole sequence or batch, and without a gradient, each loss is a plain sum over
tokens: a rank or a micro-batch adds its own tokens' part.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from titan_exp.ops.is_recomputing import is_recomputing
from titan_exp.ops.moe.routing import TINY


def sequence_balance_loss(
    scores: Float32[Tensor, "batch part experts"], choices: Int64[Tensor, "batch experts"], length: int
) -> Float32[Tensor, ""]:
    """Sum over sequences and these tokens of Σ count · score / length² · experts.

    Balanced routing gives k per sequence of `length` tokens if scores add up to 1. `choices` counts the choices of each
    expert in whole sequences.
    """
    share = choices * (choices.shape[-1] / length**2)
    return (scores.sum(1) * share).sum()


def batch_balance_loss(
    scores: Float32[Tensor, "batch part experts"], load: Float32[Tensor, " experts"]
) -> Float32[Tensor, ""]:
    """Sum over these tokens of Σ load · score, where `load` is an expert's share of choices times the experts."""
    return (scores.flatten(0, 1).sum(0) * load).sum()


def router_z_loss(logits: Float32[Tensor, "*tokens experts"]) -> Float32[Tensor, ""]:
    """Sum over these tokens of logsumexp(logits)² (Zoph et al. 2022)."""
    return logits.logsumexp(-1).square().sum()


def normalized_scores(scores: Float32[Tensor, "*tokens experts"]) -> Float32[Tensor, "*tokens experts"]:
    """Scores divided by their sum over experts."""
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def attach_loss(x: Tensor, loss: Float32[Tensor, ""]) -> Tensor:
    """`x`, whose backward pass also starts that of `loss`, with gradient 1.

    It needs no path to the objective, so it works in every pipeline schedule and with every fused loss.
    """
    return _AttachLoss.apply(x, loss)  # type: ignore[return-value]  # a Tensor


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], ctx.saved_tensors[0]


@torch.library.custom_op("titan_exp::add_unless_recomputing", mutates_args=("total",))
def add_unless_recomputing(total: Tensor, values: Tensor) -> None:
    """Add `values` to `total` in place, except when backward repeats a forward pass.

    An operator, so that compiled code asks when it runs.
    """
    if not is_recomputing():
        total.add_(values)


@add_unless_recomputing.register_fake
def _added(total: Tensor, values: Tensor) -> None:
    return None


SumCounts = Callable[[Tensor], Tensor]
"""Sum of counts over the ranks that share sequences."""
