"""Softmax over a vocabulary that is divided among ranks: each computes from its own logits, and two numbers a token
are exchanged."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The words whose logits are here."""

    first: int
    """Number of the first of them."""
    all_reduce_sum: Callable[[Tensor], Tensor]
    """The sum over all parts of a tensor, as a new tensor."""
    all_reduce_max: Callable[[Tensor], Tensor]
    """The elementwise maximum over all parts of a tensor, as a new tensor."""


@torch.no_grad()
def log_normalizer_and_target(
    logits: Float[Tensor, "tokens words"], target: Int[Tensor, " tokens"], part: VocabShard | None
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log of softmax's denominator over the whole vocabulary, and the target's logit, from fp32 logits.

    Args:
        logits: those of this part of the vocabulary; of all of it where `part` is None.
        target: a word of the whole vocabulary for each token.
        part: which words are here.
    """
    if part is None:
        return logits.logsumexp(-1), logits.gather(1, target[:, None])[:, 0]
    max_logit = part.all_reduce_max(logits.amax(-1))
    place, here = locate(target, part, logits.shape[1])
    own = torch.stack(((logits - max_logit[:, None]).exp().sum(-1), logits.gather(1, place[:, None])[:, 0] * here))
    denominator, chosen = part.all_reduce_sum(own)
    return max_logit + denominator.log(), chosen


def locate(
    target: Int[Tensor, " tokens"], part: VocabShard | None, words: int
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Column of each target among the `words` of this part, and whether it is there (1) or the column is any (0)."""
    if part is None:
        return target, torch.ones_like(target)
    column = target - part.first
    here = (column >= 0) & (column < words)
    return column.where(here, 0), here.to(target.dtype)
