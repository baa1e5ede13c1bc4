"""The language-model loss: a sum over tokens, so that dividing by the global token count is right in every layout."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""


class LossSum(NamedTuple):
    """What a loss says of a batch; both are sums over its tokens, fp32, in nats."""

    objective: Tensor
    """What is differentiated: cross-entropy, and z-loss where its coefficient is not 0."""
    cross_entropy: Tensor
    """Cross-entropy alone, detached: what is logged, so that curves with and without z-loss compare."""


def cross_entropy_sum(logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
    """Sum over tokens of -log softmax(logits)[label], in nats and fp32; labels of `IGNORE_INDEX` count nothing."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def loss_sum(
    logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"], z_loss: float = 0.0
) -> LossSum:
    """Cross-entropy plus `z_loss` · log(Z)² (Chowdhery et al. 2022), Z being softmax's denominator.

    The z-loss keeps logits near normalized, so that they do not drift away in bf16.
    """
    cross_entropy = cross_entropy_sum(logits, labels)
    if z_loss == 0:
        return LossSum(cross_entropy, cross_entropy.detach())
    log_z = torch.where(labels == IGNORE_INDEX, 0.0, logits.float().logsumexp(-1))
    return LossSum(cross_entropy + z_loss * log_z.square().sum(), cross_entropy.detach())
