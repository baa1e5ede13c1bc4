"""Vocabulary-parallel softmax: ranks compute from their own logits and exchange two numbers per token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titan_exp.ops.loss.row_softmax import has_row_kernels, row_statistics


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary shard whose logits this rank holds."""

    first: int
    """First token id of the shard."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """Sum of a tensor over all shards, as a new tensor."""
    all_reduce_max: Callable[[Tensor], Tensor]
    """Elementwise maximum of a tensor over all shards, as a new tensor."""


@torch.no_grad()
def log_normalizer_and_target(
    logits: Float[Tensor, "tokens vocab"], target: Int[Tensor, " tokens"], shard: VocabShard | None
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log of the softmax denominator over the whole vocabulary, and the target's logit, in fp32.

    `logits` are those of `shard`, or of the whole vocabulary if it is None; `target` are ids of the whole vocabulary.
    """
    if has_row_kernels(logits):
        statistics = row_statistics(logits, target, None if shard is None else shard.first)
        max_logit, denominator, chosen = statistics
        if shard is not None:
            local_max, max_logit = max_logit, shard.all_reduce_max(max_logit)
            denominator.mul_((local_max - max_logit).exp_())
            denominator, chosen = shard.all_reduce_sum(statistics[1:])
        return max_logit + denominator.log(), chosen
    max_logit = logits.amax(-1).float()
    if shard is not None:
        max_logit = shard.all_reduce_max(max_logit)
    place, here = locate(target, shard, logits.shape[1])
    # The difference is in fp32, without a copy of the logits in fp32.
    denominator = (logits - max_logit[:, None]).exp_().sum(-1)
    chosen = logits.gather(1, place[:, None])[:, 0].float() * here
    if shard is not None:
        denominator, chosen = shard.all_reduce_sum(torch.stack((denominator, chosen)))
    return max_logit + denominator.log(), chosen


def locate(
    target: Int[Tensor, " tokens"], shard: VocabShard | None, columns: int
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Column of each target in this shard of `columns` columns, and 1; any column and 0 for targets in other shards."""
    if shard is None:
        return target, torch.ones_like(target)
    column = target - shard.first
    here = (column >= 0) & (column < columns)
    return column.where(here, 0), here.to(target.dtype)
