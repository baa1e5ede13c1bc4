"""The published trainer's operators in place of ours, where they decide what is in memory.

Its query, key and value, and gate and up, are matmuls of their own; keys and values are repeated for every query head;
its loss computes whole logits in fp32, under tensor parallelism by torch's `loss_parallel`, whose temporaries are
written out here; sequence parallelism splits each sequence; its other operators are torch's. Its context parallelism
is torch's, too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from titan_exp.models.blocks import transformer
from titan_exp.models.blocks.feed_forward import FeedForward
from titan_exp.models.blocks.linear import Linear
from titan_exp.models.blocks.transformer import Attention
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops import cross_entropy
from titan_exp.ops.attention.attention_with_lse import attention_backward, attention_forward
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.cross_entropy import VocabShard, locate
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.mesh import group_named


@contextmanager
def torch_operators() -> Iterator[None]:
    """Plan torch's operators instead of our Triton kernels in the `with` block."""
    modules = [module for name, module in sys.modules.items() if name.startswith("titan_exp.ops")]
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "runs_kernel"):
                stack.enter_context(patch.object(module, "runs_kernel", lambda tensor: False))
        yield


@contextmanager
def torch_context_parallelism() -> Iterator[None]:
    """Plan `published_operators` with torch's context parallelism in the `with` block."""
    forward, backward = (OPDEFS[f"titan_exp::context_attention{part}"] for part in ("", "_backward"))
    with (
        published_operators(separate=False),
        patch.object(forward, "_init_fn", _gathered_attention),
        patch.object(backward, "_init_fn", _gathered_attention_backward),
    ):
        yield


def _of_repeated_heads(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention of as many key and value heads as query heads."""

    def forward(core: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        repeats = query.shape[1] // key.shape[1]
        return attend(core, query, *(heads.repeat_interleave(repeats, dim=1) for heads in (key, value)), *rest)

    return forward


def _gathered_attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to each gathered block, merged in fp32."""
    heads = {"query": query, "key": key, "value": value}
    out, lse = _templated_ring_attention(_group(arguments), 2, _flash, **heads, is_causal=True)[:2]
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse, query.new_empty(0)


def _gathered_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Gradients of keys and values pass from rank to rank in fp32."""
    heads = {"query": query, "key": key, "value": value, "out": arguments[2], "logsumexp": arguments[3]}
    how = (2, _flash_backward, gradient, "gradient")
    gradients = _templated_ring_attention_backward(_group(arguments), *how, **heads, is_causal=True)
    return *gradients, query.new_empty(0)


def _flash(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, ...]:
    return attention_forward(query, key, value, bias=None, causal=how["is_causal"], backend="cpu")


def _flash_backward(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, ...]:
    saved = {"out": how["out"], "lse": how["logsumexp"], "bias": None, "causal": how["is_causal"], "backend": "cpu"}
    return attention_backward(how["gradient"], query, key, value, **saved)


def _group(arguments: Sequence[Any]) -> dist.ProcessGroup:
    return group_named(arguments[arguments.index("allgather") + 1])


@contextmanager
def published_operators(*, separate: bool) -> Iterator[None]:
    """Plan the published trainer's operators in the `with` block; `separate` splits the fused matmuls."""
    with ExitStack() as stack:
        stack.enter_context(torch_operators())
        stack.enter_context(patch.object(cross_entropy, "_LogitsLoss", _ParallelLoss))
        stack.enter_context(patch.object(ModelSpec, "computes_per_sequence", True))
        for core in (CausalAttention, ContextAttention):
            stack.enter_context(patch.object(core, "forward", _of_repeated_heads(core.forward)))
        if separate:
            stack.enter_context(patch.object(FeedForward, "forward", _feed_forward))
            stack.enter_context(patch.object(Attention, "forward", _attention))
        yield


def _split(linear: Linear, x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [linear.linear_impl(x, weight) for weight in linear.weight.split(sizes)]


def _feed_forward(self: FeedForward, x: Tensor) -> Tensor:
    gate, up = _split(self.gate_up, x, [self.down.weight.shape[1]] * 2)
    return self.down(F.silu(gate) * up)


def _attention(self: Attention, x: Tensor, rope: tuple[Tensor, ...], mask: Any) -> Tensor:
    keys = self.qkv.weight.shape[0] // (self.group + 2)
    heads = (part.unflatten(-1, (-1, self.head_dim)) for part in _split(self.qkv, x, [self.group * keys, keys, keys]))
    query, key, value = heads
    query, key = transformer.rotate(query, *rope[:2]), transformer.rotate(key, *rope[:2])
    return self.out(self.core(*(part.transpose(1, 2) for part in (query, key, value)), mask).transpose(1, 2).flatten(2))


class _ParallelLoss(torch.autograd.Function):
    """Sum of the cross-entropy over tokens, with the temporaries of `torch.distributed.tensor.parallel.loss`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, z_loss: float, shard: VocabShard) -> Any:
        x = logits.float()
        shifted = x - shard.all_reduce_max(x.amax(-1))[:, None]
        total = shard.all_reduce_sum(torch.exp(shifted).sum(-1))
        result = shifted - total.log()[:, None]
        column, here = locate(labels, shard, logits.shape[1])
        ctx.save_for_backward(result, column, here)
        ctx.dtype = logits.dtype
        loss = -shard.all_reduce_sum((result.gather(1, column[:, None])[:, 0] * here).sum())
        return loss, loss.clone(), torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        result, column, here = ctx.saved_tensors
        gradient = torch.zeros_like(result)
        gradient.scatter_(1, column[:, None], -here.to(gradient.dtype)[:, None])
        return ((gradient + torch.exp(result)) * gradients[0]).to(ctx.dtype), None, None, None
