"""Language-model loss as a sum over tokens, to be divided by the global token count in any layout."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from titan_exp.ops.loss.vocab_parallel import VocabShard, locate, log_normalizer_and_target

IGNORE_INDEX = -100
"""Label of a token that is not predicted."""


class LossSum(NamedTuple):
    """Loss of a batch, summed over tokens, fp32, in nats."""

    objective: Tensor
    """The differentiated loss: cross-entropy plus z-loss."""
    cross_entropy: Tensor
    """Cross-entropy alone, detached; logged, so that curves with and without z-loss compare."""
    z_loss: Tensor | None = None
    """Z-loss alone, detached; None if its coefficient is 0."""


def cross_entropy_sum(logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
    """Sum over tokens of -log softmax(logits)[label] in fp32; labels of `IGNORE_INDEX` contribute nothing."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def loss_sum(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int[Tensor, "batch seq"],
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
) -> LossSum:
    """Cross-entropy plus `z_loss` · log(Z)², Z being the softmax denominator (Chowdhery et al. 2022).

    The z-loss keeps logits close to normalized in bf16. Labels are ids of the whole vocabulary, the logits those of
    `shard`, or of all ids if it is None. All ranks with shards call this together.
    """
    if shard is not None:
        objective, cross_entropy, z = _VocabParallelLoss.apply(logits.flatten(0, 1), labels.flatten(), z_loss, shard)
        return LossSum(objective, cross_entropy, z if z_loss else None)
    cross_entropy = cross_entropy_sum(logits, labels)
    if z_loss == 0:
        return LossSum(cross_entropy, cross_entropy.detach())
    log_z = torch.where(labels == IGNORE_INDEX, 0.0, logits.float().logsumexp(-1))
    z = z_loss * log_z.square().sum()
    return LossSum(cross_entropy + z, cross_entropy.detach(), z.detach())


def logits_gradient(
    logits: Float[Tensor, "tokens vocab"],
    log_z: Float[Tensor, " tokens"],
    labels: Int[Tensor, " tokens"],
    z_loss: float,
    shard: VocabShard | None,
) -> Float[Tensor, "tokens vocab"]:
    """Gradient of the summed loss with respect to fp32 logits, in place: p - onehot, plus 2 · z_loss · log Z · p."""
    gradient = logits.sub_(log_z[:, None]).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_z)[:, None]
    predicted = labels != IGNORE_INDEX
    column, here = locate(labels.where(predicted, 0), shard, logits.shape[1])
    gradient.scatter_add_(1, column[:, None], -here.to(gradient.dtype)[:, None])
    return gradient * predicted[:, None]


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, shard: VocabShard) -> Any:
        predicted = labels != IGNORE_INDEX
        log_z, chosen = log_normalizer_and_target(logits.float(), labels.where(predicted, 0), shard)
        ctx.save_for_backward(logits, log_z, labels)
        ctx.options = (z_loss, shard)
        cross_entropy = ((log_z - chosen) * predicted).sum()
        z = z_loss * (log_z.square() * predicted).sum()
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, log_z, labels = ctx.saved_tensors
        own = logits.float() if logits.dtype != torch.float32 else logits.clone()
        gradient = logits_gradient(own, log_z, labels, *ctx.options)
        return (gradient * gradients[0]).to(logits.dtype), None, None, None
