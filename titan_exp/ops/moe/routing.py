"""Routing of tokens to experts: scores, group-limited top k with the lowest index at ties, weights, and balance losses.

No layout changes a balance loss. The share f of choices is known over a whole sequence or batch and has no gradient, so
the loss is a plain sum over tokens, to which each rank and micro-batch adds its tokens' part.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from titan_exp.ops.autograd import is_recomputing, operator

Scores = Float32[Tensor, "*tokens experts"]
Chosen = Int64[Tensor, "*tokens k"]
Loss = Float32[Tensor, ""]
Sorted = tuple[Tensor, Tensor, Tensor]  # result of `permutation.sort_by_expert`

TINY = 1e-20  # term added to the sum of the chosen scores, which sigmoids may round to 0


class Routing(NamedTuple):
    """Experts of each token, best first, and their weights."""

    experts: Int64[Tensor, "tokens k"]  # chosen experts
    weights: Float32[Tensor, "tokens k"]  # factors of the experts' outputs
    order: Sorted | None = None  # sorted choices, if the router counted by them


def choose_experts(
    scores: Scores, k: int, *, groups: int = 1, active_groups: int = 1, top2_groups: bool = False
) -> Chosen:
    """Choose the k experts with the highest scores, in `active_groups` of `groups` equal groups of neighbours. A
    group's score is its maximum (DeepSeek V2), or the sum of its two highest with `top2_groups` (V3). Among equal
    scores the lowest index wins. There is no gradient."""
    scores = scores.detach()
    if active_groups < groups:
        grouped = scores.unflatten(-1, (groups, -1))
        of_groups = grouped.topk(2, dim=-1).values.sum(-1) if top2_groups else grouped.amax(-1)
        chosen = topk_lowest_index(of_groups, active_groups)
        closed = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, chosen, False)
        scores = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    return topk_lowest_index(scores, k)


@operator("topk_lowest_index", fake=lambda scores, k: scores.new_empty(*scores.shape[:-1], k, dtype=torch.int64))
def topk_lowest_index(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores of each row, descending, lowest index first among equals. It is an operator of
    its own because `torch.topk` leaves the order of equals open, and so that activation checkpointing can keep the
    choice by name."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def expert_weights(scores: Scores, experts: Chosen, *, normalized: bool, scale: float) -> Float32[Tensor, "*tokens k"]:
    """Scores of the chosen experts, divided by their sum if `normalized`, times `scale`."""
    weights = scores.gather(-1, experts)
    if normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights if scale == 1 else weights * scale


def choices_per_expert(experts: Int64[Tensor, "rows choices"], count: int) -> Int64[Tensor, "rows count"]:
    """Number of times that each expert is chosen in each row, without a device sync or atomics."""
    edges = torch.arange(count + 1, device=experts.device).expand(experts.shape[0], -1).contiguous()
    return torch.searchsorted(experts.sort(-1).values, edges).diff(dim=-1)


def router_scores(logits: Float[Tensor, "*tokens experts"], *, sigmoid: bool) -> Scores:
    """Softmax or sigmoid of the logits, in fp32."""
    return logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)


def sequence_balance_loss(
    scores: Float32[Tensor, "batch part experts"], choices: Int64[Tensor, "batch experts"], length: int
) -> Loss:
    """Sum of Σ count · score / length² · experts over sequences and these tokens. Balanced routing gives k per sequence
    of `length` tokens if scores add up to 1. `choices` counts the choices of each expert in whole sequences."""
    share = choices * (choices.shape[-1] / length**2)
    return (scores.sum(1) * share).sum()


def batch_balance_loss(scores: Float32[Tensor, "batch part experts"], load: Float32[Tensor, " experts"]) -> Loss:
    """Sum of Σ load · score over these tokens, where `load` is an expert's share of choices times the number of
    experts."""
    return (scores.flatten(0, 1).sum(0) * load).sum()


def router_z_loss(logits: Scores) -> Loss:
    """Sum of logsumexp(logits)² over these tokens (Zoph et al. 2022)."""
    return logits.logsumexp(-1).square().sum()


def normalized_scores(scores: Scores) -> Scores:
    """Scores divided by their sum over experts."""
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def attach_loss(x: Tensor, loss: Loss) -> Tensor:
    """Return `x`, whose backward pass also starts the backward pass of `loss`, with gradient 1. The loss needs no path
    to the objective, so this works in every pipeline schedule and with every fused loss."""
    return _AttachLoss.apply(x, loss)  # type: ignore[return-value]  # a Tensor


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], ctx.saved_tensors[0]


@operator("add_unless_recomputing", mutates_args=("total",))
def add_unless_recomputing(total: Tensor, values: Tensor) -> None:
    """Add `values` to `total` in place, except when backward repeats a forward pass. It is an operator so that compiled
    code checks at run time."""
    if not is_recomputing():
        total.add_(values)


SumCounts = Callable[[Tensor], Tensor]  # sums counts over the ranks that share sequences
