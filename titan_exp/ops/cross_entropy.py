"""Cross-entropy of logits, whole or over chunks of the vocabulary, with or without the last linear layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.autograd import needs_input_grad
from titan_exp.ops.triton_kernels import jit, rounded, runs_kernel, tl

Logits = Float[Tensor, "tokens vocab"]
Tokens = Float[Tensor, " tokens"]
Labels = Int[Tensor, " tokens"]

IGNORE_INDEX = -100  # label of a position without a target
BLOCK, WARPS = 4096, 8
"""Logits of a row that a kernel program computes at a time, and its number of warps: 16 logits a thread."""


class LossSum(NamedTuple):
    """Loss of a batch, summed over tokens, fp32, in nats."""

    objective: Tensor  # the differentiated loss: cross-entropy plus z-loss
    cross_entropy: Tensor  # cross-entropy alone, detached; logged, so that curves with and without z-loss compare
    z_loss: Tensor | None = None  # z-loss alone, detached; None if its coefficient is 0


@dataclass(frozen=True)
class VocabShard:
    """Vocabulary shard whose logits this rank holds."""

    first: int  # first token id of the shard
    all_reduce_sum: Callable[[Tensor], Tensor]  # sums a tensor over all shards, into a new tensor
    all_reduce_max: Callable[[Tensor], Tensor]
    """Takes the elementwise maximum of a tensor over all shards, into a new tensor."""


def cross_entropy_sum(logits: Float[Tensor, "batch seq vocab"], labels: Int[Tensor, "batch seq"]) -> Float[Tensor, ""]:
    """Sum over tokens of -log softmax(logits)[label] in fp32; labels of `IGNORE_INDEX` contribute nothing."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def loss_sum(
    logits: Float[Tensor, "batch seq vocab"],
    labels: Int[Tensor, "batch seq"],
    z_loss: float = 0.0,
    shard: VocabShard | None = None,
) -> LossSum:
    """Cross-entropy plus `z_loss` · log(Z)², Z being the softmax denominator (Chowdhery et al. 2022). The z-loss keeps
    logits close to normalized in bf16. Labels are ids of the whole vocabulary. Logits are those of `shard`, or of all
    ids if it is None. All ranks with shards call this together."""
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
    logits: Logits,
    log_z: Tokens,
    labels: Labels,
    z_loss: float,
    shard: VocabShard | None,
    scale: Float[Tensor, ""] | None = None,
    out: Logits | None = None,
) -> None:
    """Overwrite the logits, or `out`, by `scale` times the gradient of the summed loss, computed in fp32. The gradient
    is p - onehot, plus 2 · z_loss · log Z · p. One kernel, Triton's or the compiler's, reads and writes the logits in
    their own dtype; only a CPU makes the gradient in fp32."""
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


@torch.no_grad()
def log_normalizer_and_target(logits: Logits, target: Labels, shard: VocabShard | None) -> tuple[Tokens, Tokens]:
    """Log of the softmax denominator over the whole vocabulary, and the target's logit, in fp32. `logits` are the
    shard's, or the whole vocabulary's if `shard` is None; `target` are ids of the whole vocabulary."""
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


def locate(target: Labels, shard: VocabShard | None, columns: int) -> tuple[Labels, Labels]:
    """Column of each target in this shard of `columns` columns, and 1; for targets in other shards, any column and
    0."""
    if shard is None:
        return target, torch.ones_like(target)
    column = target - shard.first
    here = (column >= 0) & (column < columns)
    return column.where(here, 0), here.to(target.dtype)


def has_row_kernels(logits: Tensor) -> bool:
    """True if the kernels take these logits: `runs_kernel` is true and columns are adjacent."""
    return runs_kernel(logits) and logits.stride(-1) == 1


def row_statistics(logits: Logits, target: Labels, first: int | None) -> Float[Tensor, "3 tokens"]:
    """Maximum of each row, sum of exponentials relative to it, and the target's logit, in fp32. `first` is the first
    token id of a vocabulary shard; targets in other shards get 0. For the whole vocabulary it is None, and a target
    outside gets NaN."""
    statistics = logits.new_empty(3, logits.shape[0], dtype=torch.float32)
    if isinstance(logits, FakeTensor):
        # Fake tensors have no values; the planner sees one call, and the bytes that the kernel reads and writes.
        torch.sum(logits, -1, dtype=torch.float32, out=statistics[0])
        return statistics
    sizes, absent = (logits.stride(0), logits.shape[1], first or 0), math.nan if first is None else 0.0
    kernel = row_statistics_kernel[(logits.shape[0],)]
    kernel(logits, target, *statistics, *sizes, absent, block=BLOCK, num_warps=WARPS)
    return statistics


def write_row_gradient(
    logits: Logits, log_z: Tokens, labels: Labels, factor: Tokens, *, z_loss: float, first: int, out: Logits
) -> None:
    """Write the gradient of cross-entropy plus z-loss, times a factor per token, to `out`, which may be the logits.
    `log_z` and `factor` are in fp32. Labels outside the shard that starts at the token id `first` match no column."""
    if isinstance(logits, FakeTensor):
        torch.mul(logits, factor[:, None], out=out)  # as above
        return
    sizes = logits.stride(0), out.stride(0), logits.shape[1], first
    kernel = logits_gradient_kernel[(logits.shape[0],)]
    kernel(logits, out, log_z, labels, factor, *sizes, z_loss, block=BLOCK, num_warps=WARPS)


@jit
def row_statistics_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    logits: tl.tensor,
    target: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    chosen: tl.tensor,
    stride: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    absent: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Online softmax: the maximum, the sum of exponentials relative to it, and the target's logit, or `absent`."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    maximum = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        before = maximum
        maximum = tl.maximum(before, tl.max(x, 0))
        # If all logits so far are -inf, the sum is 0 and not NaN.
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        sums = sums * tl.exp(before - shift) + tl.exp(x - shift)
    tl.store(largest + row, maximum)
    tl.store(total + row, tl.sum(sums, 0))
    place = tl.load(target + row) - first
    here = (place >= 0) & (place < columns)
    tl.store(chosen + row, tl.load(logits + place, mask=here, other=absent).to(tl.float32))


@jit
def logits_gradient_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    logits: tl.tensor,
    gradient: tl.tensor,
    log_z: tl.tensor,
    labels: tl.tensor,
    factor: tl.tensor,
    stride: tl.tensor,
    gradient_stride: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    z_loss: tl.tensor,
    block: tl.constexpr,
) -> None:
    """Gradient of cross-entropy plus z-loss, times `factor`, written to another tensor or over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    gradient += row * gradient_stride
    normalizer, scale = tl.load(log_z + row), tl.load(factor + row)
    slope = 1 + 2 * z_loss * normalizer
    place = tl.load(labels + row) - first
    for start in range(0, columns, block):  # type: ignore[arg-type]  # a loop of Triton
        column = start + tl.arange(0, block)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        change = (tl.exp(x - normalizer) * slope - (column == place).to(tl.float32)) * scale
        tl.store(gradient + column, rounded(change, gradient.dtype.element_ty), mask=inside)  # type: ignore[attr-defined]  # pointers have it


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
    """Compute `loss_sum(hidden @ weight.T, labels, z_loss, shard)` with logits of at most `chunk_tokens` tokens in
    memory.

    Matmuls are in the input dtype; softmax and sums over chunks, including the weight's gradient, are in fp32. With a
    vocabulary shard, the hidden states' gradient is partial over tp. Chunks have equal lengths except the last.
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
    z: Tensor  # z-loss; 0 without a coefficient
    log_z: Tensor  # log of each token's softmax denominator


def chunk_loss(  # compiled functions take positional arguments
    logits: Logits, labels: Labels, z_loss: float, shard: VocabShard | None
) -> ChunkLoss:
    """Loss of a chunk of logits: all computation between the head's matmul and the logits' gradient."""
    predicted = labels != IGNORE_INDEX
    # Ignored tokens look up any column; their contribution is multiplied by 0.
    log_z, chosen = log_normalizer_and_target(logits, labels.where(predicted, 0), shard)
    cross_entropy = ((log_z - chosen) * predicted).sum()
    z = z_loss * (log_z.square() * predicted).sum() if z_loss else torch.zeros_like(cross_entropy)
    return ChunkLoss(cross_entropy, z, log_z)


class ChunkFunctions(NamedTuple):
    """Functions between the head's matmuls; by default they are not compiled."""

    loss: Callable[..., ChunkLoss] = chunk_loss
    write_gradient: Callable[..., None] = write_logits_gradient

    def compiled(self, compile_: Callable[..., Any]) -> "ChunkFunctions":
        return ChunkFunctions(compile_(chunk_loss), compile_(write_logits_gradient))


class _OneChunk(torch.autograd.Function):
    """Loss of whole logits; backward overwrites them with their gradient, without a sum over chunks and with a single
    rounding."""

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
        # A split backward pass comes twice, first for the hidden states, then for the weight.
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
        # Scaling into a new tensor of the weight's dtype avoids a second fp32 tensor.
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
        # They are freed before the next chunk's are allocated.
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
