"""Language-model loss as a sum over tokens, to be divided by the global token count in any layout."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from titan_exp.ops.loss.row_softmax import has_row_kernels, write_row_gradient
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
    if shard is not None or has_row_kernels(logits):
        objective, cross_entropy, z = _LogitsLoss.apply(logits.flatten(0, 1), labels.flatten(), z_loss, shard)
        return LossSum(objective, cross_entropy, z if z_loss else None)
    cross_entropy = cross_entropy_sum(logits, labels)
    if z_loss == 0:
        return LossSum(cross_entropy, cross_entropy.detach())
    log_z = torch.where(labels == IGNORE_INDEX, 0.0, logits.float().logsumexp(-1))
    z = z_loss * log_z.square().sum()
    return LossSum(cross_entropy + z, cross_entropy.detach(), z.detach())


def write_logits_gradient(  # noqa: PLR0917  # compiled functions take positional arguments
    logits: Float[Tensor, "tokens vocab"],
    log_z: Float[Tensor, " tokens"],
    labels: Int[Tensor, " tokens"],
    z_loss: float,
    shard: VocabShard | None,
    scale: Float[Tensor, ""] | None = None,
    out: Float[Tensor, "tokens vocab"] | None = None,
) -> None:
    """Overwrite the logits, or `out`, by `scale` times the gradient of the summed loss, computed in fp32.

    The gradient is p - onehot, plus 2 · z_loss · log Z · p. One kernel, Triton's or the compiler's, reads and writes
    the logits in their own dtype; only a CPU makes the gradient in fp32.
    """
    out = logits if out is None else out
    predicted = labels != IGNORE_INDEX
    factor = predicted.float() if scale is None else predicted * scale
    if has_row_kernels(logits):
        first = 0 if shard is None else shard.first
        write_row_gradient(logits, log_z, labels, factor, z_loss=z_loss, first=first, out=out)
        return
    gradient = (logits - log_z[:, None]).exp_()
    if z_loss:
        gradient.mul_((1 + 2 * z_loss * log_z)[:, None])
    column, here = locate(labels.where(predicted, 0), shard, logits.shape[1])
    if torch.compiler.is_compiling():
        # A scatter would need the fp32 gradient in memory.
        onehot = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
        out.copy_((gradient - torch.where(onehot, here[:, None], 0)) * factor[:, None])
    else:
        gradient.scatter_add_(1, column[:, None], -here.to(gradient.dtype)[:, None])
        torch.mul(gradient, factor[:, None], out=out)


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, shard: VocabShard | None) -> Any:
        predicted = labels != IGNORE_INDEX
        log_z, chosen = log_normalizer_and_target(logits, labels.where(predicted, 0), shard)
        ctx.save_for_backward(logits, log_z, labels)
        ctx.options = (z_loss, shard)
        cross_entropy = ((log_z - chosen) * predicted).sum()
        z = z_loss * (log_z.square() * predicted).sum()
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z, cross_entropy, z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, log_z, labels = ctx.saved_tensors
        z_loss, shard = ctx.options
        gradient = torch.empty_like(logits)
        write_logits_gradient(logits, log_z, labels, z_loss, shard, gradients[0], gradient)
        return gradient, None, None, None
