"""Fused LM head and cross-entropy in chunks of tokens, so that the logits are never in memory twice, or never whole.

Tokens of one chunk keep their logits until backward, which overwrites them by their gradient. With several chunks the
gradients are computed in forward, chunk by chunk; backward only scales them by the incoming gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from titan_exp.ops.autograd import needs_input_grad
from titan_exp.ops.loss.cross_entropy import (
    IGNORE_INDEX,
    LossSum,
    VocabShard,
    log_normalizer_and_target,
    write_logits_gradient,
)


def linear_loss_sum(
    hidden: Float[Tensor, "batch seq dim"],
    weight: Float[Tensor, "vocab dim"],
    labels: Int[Tensor, "batch seq"],
    *,
    chunk_tokens: int,
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
    functions: "ChunkFunctions | None" = None,
) -> LossSum:
    """`loss_sum(hidden @ weight.T, labels, z_loss, shard)` with logits of at most `chunk_tokens` tokens in memory.

    Matmuls are in the input dtype; softmax and sums over chunks (also of the weight's gradient) in fp32. With a
    vocabulary shard, the hidden states' gradient is partial over tp. Chunks are of equal length but for the last.
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    functions = functions or ChunkFunctions()
    options = (labels, functions, z_loss, shard)
    chunks = max(1, -(-hidden.shape[0] // chunk_tokens))
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        function, given = (_OneChunk, options) if chunks == 1 else (_ManyChunks, (chunks, *options))
        objective, cross_entropy, z = function.apply(hidden, weight, *given)
        return LossSum(objective, cross_entropy, z if z_loss else None)
    sums = _over_chunks(hidden, weight, chunks, *options, gradients=False)
    return LossSum(sums.cross_entropy + sums.z, sums.cross_entropy, sums.z if z_loss else None)


class ChunkLoss(NamedTuple):
    """Loss of a chunk's logits, summed over tokens in fp32."""

    cross_entropy: Tensor
    """Cross-entropy."""
    z: Tensor
    """Z-loss; 0 without a coefficient."""
    log_z: Tensor
    """Log of the softmax denominator of each token."""


def chunk_loss(  # compiled functions take positional arguments
    logits: Float[Tensor, "tokens vocab"], labels: Int[Tensor, " tokens"], z_loss: float, shard: VocabShard | None
) -> ChunkLoss:
    """Loss of a chunk of logits: everything between the head's matmul and the logits' gradient."""
    predicted = labels != IGNORE_INDEX
    # Ignored tokens look up any column; their contribution is multiplied by 0.
    log_z, chosen = log_normalizer_and_target(logits, labels.where(predicted, 0), shard)
    cross_entropy = ((log_z - chosen) * predicted).sum()
    z = z_loss * (log_z.square() * predicted).sum() if z_loss else torch.zeros_like(cross_entropy)
    return ChunkLoss(cross_entropy, z, log_z)


class ChunkFunctions(NamedTuple):
    """What is computed between the head's matmuls, by default without a compiler."""

    loss: Callable[..., ChunkLoss] = chunk_loss
    """`chunk_loss`."""
    write_gradient: Callable[..., None] = write_logits_gradient
    """`write_logits_gradient`."""

    def compiled(self, compile_: Callable[..., Any]) -> "ChunkFunctions":
        """The same functions, compiled."""
        return ChunkFunctions(compile_(chunk_loss), compile_(write_logits_gradient))


class _OneChunk(torch.autograd.Function):
    """Loss of whole logits, which backward overwrites by their gradient: no sum over chunks, one rounding."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> Any:
        functions, z_loss, shard = options
        logits = hidden @ weight.T
        found = functions.loss(logits, labels, z_loss, shard)
        ctx.save_for_backward(hidden, weight, labels, found.log_z)
        ctx.options, ctx.logits, ctx.gradient = options, logits, None
        ctx.left = list(ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(found.cross_entropy, found.z)
        return found.cross_entropy + found.z, found.cross_entropy, found.z

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, labels, log_z = ctx.saved_tensors
        wanted = needs_input_grad(ctx)
        assert all(left or not want for left, want in zip(ctx.left, wanted, strict=True)), "the logits are overwritten"
        # A split backward pass comes twice: for the hidden states, then for the weight.
        if ctx.gradient is None:
            functions, z_loss, shard = ctx.options
            functions.write_gradient(ctx.logits, log_z, labels, z_loss, shard, gradients[0])
            ctx.gradient, ctx.logits = ctx.logits, None
        hidden_grad = ctx.gradient @ weight if wanted[0] else None
        weight_grad = ctx.gradient.T @ hidden if wanted[1] else None
        ctx.left = [left and not want for left, want in zip(ctx.left, wanted, strict=True)]
        if not any(ctx.left):
            ctx.gradient = None
        return hidden_grad, weight_grad, None, None, None, None


class _Sums(NamedTuple):
    cross_entropy: Tensor
    z: Tensor
    hidden_grad: Tensor | None
    weight_grad: Tensor | None


class _ManyChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *options: Any) -> Any:
        sums = _over_chunks(hidden, weight, *options, gradients=True)
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
    chunks: int,
    labels: Tensor,
    functions: ChunkFunctions,
    z_loss: float,
    shard: VocabShard | None,
    *,
    gradients: bool,
) -> _Sums:
    cross_entropy, z = hidden.new_zeros((), dtype=torch.float32), hidden.new_zeros((), dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden) if gradients else None
    weight_grad = torch.empty_like(weight, dtype=torch.float32) if gradients else None
    length = max(1, -(-hidden.shape[0] // chunks))
    for start in range(0, hidden.shape[0], length):
        chunk = slice(start, start + length)
        logits = hidden[chunk] @ weight.T
        found = functions.loss(logits, labels[chunk], z_loss, shard)
        cross_entropy += found.cross_entropy
        z += found.z
        if hidden_grad is not None and weight_grad is not None:
            functions.write_gradient(logits, found.log_z, labels[chunk], z_loss, shard, None)
            torch.mm(logits, weight, out=hidden_grad[chunk])
            _accumulate_outer(weight_grad, logits, hidden[chunk], first=start == 0)
        # Freed before the next chunk's are allocated.
        del logits
    return _Sums(cross_entropy, z, hidden_grad, weight_grad)


def _accumulate_outer(total: Tensor, grad: Tensor, hidden: Tensor, *, first: bool) -> None:
    """`total += grad.T @ hidden`, or `=` for the first chunk; on CUDA the matmul itself adds in fp32."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        torch.addmm(total, grad.T, hidden, out_dtype=torch.float32, beta=0 if first else 1, out=total)
    elif hidden.dtype == torch.float32:
        torch.addmm(total, grad.T, hidden, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(grad.T @ hidden)
    else:
        total += grad.T @ hidden
