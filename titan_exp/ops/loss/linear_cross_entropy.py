"""Fused LM head and cross-entropy in chunks of tokens, so that the logits are never all in memory.

Gradients are computed in forward, chunk by chunk; backward only scales them by the incoming gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX, LossSum, logits_gradient
from titan_exp.ops.loss.vocab_parallel import VocabShard, log_normalizer_and_target


def linear_loss_sum(
    hidden: Float[Tensor, "batch seq dim"],
    weight: Float[Tensor, "vocab dim"],
    labels: Int[Tensor, "batch seq"],
    *,
    chunk_tokens: int,
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
    chunk_fn: Callable[..., Any] | None = None,
) -> LossSum:
    """`loss_sum(hidden @ weight.T, labels, z_loss, shard)` with logits of at most `chunk_tokens` tokens in memory.

    Matmuls are in the input dtype; softmax and sums over chunks (also of the weight's gradient) in fp32. With a
    vocabulary shard, the hidden states' gradient is partial over tp. `chunk_fn` is `chunk_loss`, maybe compiled.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    chunk_fn = chunk_fn or chunk_loss
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        objective, cross_entropy, z = _LinearLoss.apply(hidden, weight, chunk_fn, labels, chunk_tokens, z_loss, shard)
        return LossSum(objective, cross_entropy, z if z_loss else None)
    sums = _over_chunks(hidden, weight, labels, chunk_tokens, z_loss, shard, chunk_fn=chunk_fn, gradients=False)
    return LossSum(sums.cross_entropy + sums.z, sums.cross_entropy, sums.z if z_loss else None)


class ChunkLoss(NamedTuple):
    """Loss and gradient of a chunk's logits."""

    cross_entropy: Tensor
    """Sum over tokens, fp32."""
    z: Tensor | None
    """Sum of z-losses; None without a coefficient."""
    grad: Tensor | None
    """Gradient of both with respect to the logits, in their dtype; None if not requested."""


def chunk_loss(  # compiled functions take positional arguments
    logits: Float[Tensor, "tokens vocab"],
    labels: Int[Tensor, " tokens"],
    z_loss: float,
    shard: VocabShard | None,
    gradients: bool,
) -> ChunkLoss:
    """Loss and gradient of a chunk of logits, which may be overwritten: everything between the head's matmuls."""
    dtype, logits = logits.dtype, logits.float()
    predicted = labels != IGNORE_INDEX
    # Ignored tokens look up any column; their contribution is multiplied by 0.
    log_z, chosen = log_normalizer_and_target(logits, labels.where(predicted, 0), shard)
    cross_entropy = ((log_z - chosen) * predicted).sum()
    z = z_loss * (log_z.square() * predicted).sum() if z_loss else None
    if not gradients:
        return ChunkLoss(cross_entropy, z, None)
    return ChunkLoss(cross_entropy, z, logits_gradient(logits, log_z, labels, z_loss, shard).to(dtype))


class _Sums(NamedTuple):
    cross_entropy: Tensor
    z: Tensor
    hidden_grad: Tensor | None
    weight_grad: Tensor | None


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, chunk_fn: Callable[..., ChunkLoss], *options: Any) -> Any:
        sums = _over_chunks(hidden, weight, *options, chunk_fn=chunk_fn, gradients=True)
        ctx.save_for_backward(sums.hidden_grad, sums.weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(sums.cross_entropy, sums.z)
        return sums.cross_entropy + sums.z, sums.cross_entropy, sums.z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        scale = gradients[0]
        hidden_grad, weight_grad = ctx.saved_tensors
        # Scaled into a new tensor of the weight's dtype, without a second fp32 tensor.
        scaled = torch.empty_like(weight_grad, dtype=ctx.weight_dtype)
        torch.mul(weight_grad, scale, out=scaled)
        return (hidden_grad * scale).to(hidden_grad.dtype), scaled, None, None, None, None, None


def _over_chunks(  # noqa: PLR0917  # autograd functions take positional arguments
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    z_loss: float,
    shard: VocabShard | None,
    *,
    chunk_fn: Callable[..., ChunkLoss],
    gradients: bool,
) -> _Sums:
    cross_entropy, z = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden) if gradients else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if gradients else None
    for start in range(0, hidden.shape[0], chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        found = chunk_fn(hidden[chunk] @ weight.T, labels[chunk], z_loss, shard, gradients)
        cross_entropy += found.cross_entropy
        if found.z is not None:
            z += found.z
        if hidden_grad is not None and weight_grad is not None and found.grad is not None:
            hidden_grad[chunk] = found.grad @ weight
            _add_outer(weight_grad, found.grad, hidden[chunk])
    return _Sums(cross_entropy, z, hidden_grad, weight_grad)


def _add_outer(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """`total += grad.T @ hidden`, accumulated in fp32 within a chunk too, if the device supports it."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        total += torch.mm(grad.T, hidden, out_dtype=torch.float32)
    elif hidden.dtype == torch.float32:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden
