"""Vocabulary-parallel softmax: ranks compute from their own logits and exchange two numbers per token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
    """Log of the softmax denominator over the whole vocabulary, and the target's logit, from fp32 logits.

    `logits` are those of `shard`, or of the whole vocabulary if it is None; `target` are ids of the whole vocabulary.
    """
    if shard is None:
        return logits.logsumexp(-1), logits.gather(1, target[:, None])[:, 0]
    max_logit = shard.all_reduce_max(logits.amax(-1))
    place, here = locate(target, shard, logits.shape[1])
    own = torch.stack(((logits - max_logit[:, None]).exp().sum(-1), logits.gather(1, place[:, None])[:, 0] * here))
    denominator, chosen = shard.all_reduce_sum(own)
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
