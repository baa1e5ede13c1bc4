"""Causal attention over a zigzag-sharded sequence; keys and values move by ring or all-gather.

A rank's queries attend causally to the own block, to the head chunk of every earlier rank, and with their tail chunk to
the whole block of every later rank. So no kernel computes hidden scores, and without documents no mask is needed.
Partial outputs are merged by log-sum-exp.
"""

from collections.abc import Iterator
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.ops.attention.attention_with_lse import (
    HIDDEN,
    PartialBackend,
    attention_backward,
    attention_forward,
    merge_lse,
)
from titan_exp.parallel.context_parallel.all_gather import AllGatherKV
from titan_exp.parallel.context_parallel.latents import WholeKV
from titan_exp.parallel.context_parallel.ring import RingKV
from titan_exp.parallel.process_groups import gather_documents, group_named

ExchangeMethod = Literal["ring", "allgather", "whole"]
"""Exchange of keys and values; `whole` is none, since every rank has them."""


class ContextAttention(nn.Module):
    """Replaces `CausalAttention`, with the same arguments, each this rank's part of the sequence."""

    def __init__(
        self,
        backend: PartialBackend,
        method: ExchangeMethod,
        group: dist.ProcessGroup,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.backend: PartialBackend = backend
        self.scale = scale
        self.method, self.group = method, group.group_name
        self.kernel: PartialBackend = "cpu" if device.type == "cpu" else backend
        """The kernel that runs."""

    def mask(self, documents: Tensor | None) -> Tensor | None:
        """Argument `mask` of `forward`: documents [degree, batch, part] of all ranks; None for causal attention."""
        return None if documents is None else gather_documents(documents, self.group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from this rank's queries [batch, heads, part, head_dim] to all earlier positions."""
        out, _ = context_attention(query, key, value, mask, self.kernel, self.method, self.group, self.scale)
        return out


# A custom op is opaque to the compiler, which would otherwise break the graph at every message.
@torch.library.custom_op("titan_exp::context_attention", mutates_args=())
def context_attention(  # noqa: PLR0917  # custom ops take positional arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    backend: str,
    method: str,
    group: str,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Output in the dtype of `query`, and log-sum-exp [batch, heads, part] in fp32."""
    exchange = _exchange(method, group)
    out = lse = None
    for rank, k, v in _blocks(exchange, key, value):
        rows, keys, causal = _visible(exchange.rank, rank, query.shape[2])
        part, part_lse = attention_forward(
            query[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            bias=_bias(documents, exchange.rank, rank, query.dtype),
            causal=causal and documents is None,
            backend=cast("PartialBackend", backend),
            scale=scale,
        )
        if out is None or lse is None:
            out, lse = part.float(), part_lse.clone(memory_format=torch.contiguous_format)
        else:
            merge_lse(out[:, :, rows], lse[:, :, rows], part, part_lse)
    assert out is not None, "the own block comes first"
    assert lse is not None
    return _like_projection(query, value).copy_(out), lse


@torch.library.custom_op("titan_exp::context_attention_backward", mutates_args=())
def context_attention_backward(  # noqa: PLR0917  # custom ops take positional arguments
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    out: Tensor,
    lse: Tensor,
    backend: str,
    method: str,
    group: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, summed in fp32 over blocks and ranks."""
    exchange = _exchange(method, group)
    query_grad = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for rank, k, v in _blocks(exchange, key, value):
        rows, keys, causal = _visible(exchange.rank, rank, query.shape[2])
        dq, dk, dv = attention_backward(
            gradient[:, :, rows],
            query[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out=out[:, :, rows],
            lse=lse[:, :, rows],
            bias=_bias(documents, exchange.rank, rank, query.dtype),
            causal=causal and documents is None,
            backend=cast("PartialBackend", backend),
            scale=scale,
        )
        query_grad[:, :, rows] += dq
        block_grad = key.new_zeros((*k.shape[:-1], k.shape[-1] + v.shape[-1]), dtype=torch.float32)
        key_grad, value_grad = _split(block_grad, key)
        key_grad[:, :, keys], value_grad[:, :, keys] = dk, dv
        exchange.accumulate_grad(rank, block_grad)
    key_grad, value_grad = _split(exchange.reduced_grad(), key)
    # Results of an operator share no memory: slices are copied even in fp32.
    key_grad, value_grad = (grad.to(key.dtype).contiguous() for grad in (key_grad, value_grad))
    return query_grad.to(query.dtype), key_grad, value_grad


@context_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like_projection(query, value), query.new_empty(query.shape[:3], dtype=torch.float32)


@context_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, documents, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*context_attention_backward(gradient, *ctx.saved_tensors, *ctx.how), *(None,) * 5)


context_attention.register_autograd(_backward, setup_context=_save)


def _exchange(method: str, group: str) -> RingKV | AllGatherKV | WholeKV:
    kinds = {"ring": RingKV, "allgather": AllGatherKV, "whole": WholeKV}
    return kinds[method](group_named(group))


def _blocks(
    exchange: RingKV | AllGatherKV | WholeKV, key: Tensor, value: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Source rank, keys and values of every block, the own block first."""
    if isinstance(exchange, WholeKV):
        yield from exchange.blocks(key, value)
        return
    for rank, block in exchange.blocks(torch.cat((key, value), dim=-1)):
        yield rank, *_split(block, key)


def _visible(rank: int, other: int, length: int) -> tuple[slice, slice, bool]:
    """Query rows and keys that attend between two ranks' blocks of `length` tokens, and True if causally."""
    everything, tail = slice(0, length), slice(length // 2, length)
    if other == rank:
        return everything, everything, True
    # A rank whose head chunk is earlier has a later tail chunk.
    return (everything, slice(0, length // 2), False) if other < rank else (tail, everything, False)


def _bias(documents: Tensor | None, rank: int, other: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [batch, 1, rows, keys] of other documents, and of later tokens in the own block."""
    if documents is None:
        return None
    rows, keys, causal = _visible(rank, other, documents.shape[2])
    hidden = documents[rank][:, rows, None] != documents[other][:, None, keys]
    if causal:
        hidden |= torch.ones(hidden.shape[1:], dtype=torch.bool, device=hidden.device).triu(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, HIDDEN)[:, None]


def _split(block: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_heads, part, width], of two widths, from a tensor with both."""
    width = key.shape[-1]
    return block[..., :width], block[..., width:]


def _like_projection(query: Tensor, value: Tensor) -> Tensor:
    """Empty heads [batch, heads, part, v_dim], contiguous per token as the next projection reads them."""
    batch, heads, part, _ = query.shape
    return query.new_empty((batch, part, heads, value.shape[-1])).transpose(1, 2)
