"""Causal attention over a sequence cut head and tail, its keys and values exchanged by ring or all-gather.

A part attends to its own block causally, to the head chunk of every rank before it, and with its tail chunk to all of
every rank after it; so no kernel computes what a causal mask would hide, and without documents there is no mask at
all. The parts are merged by their log-sum-exp.
"""

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
from titan_exp.parallel.context_parallel.ring import RingKV
from titan_exp.parallel.process_groups import gather_documents, group_named

ExchangeMethod = Literal["ring", "allgather"]


class ContextAttention(nn.Module):
    """Takes the place of `CausalAttention`, with the same arguments, each of them this rank's part.

    Args:
        backend: kernel behind attention on CUDA; a CPU has one of its own.
        method: how keys and values come to a rank.
        group: the ranks that share a sequence.
        device: this rank's.
    """

    def __init__(
        self, backend: PartialBackend, method: ExchangeMethod, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        super().__init__()
        self.backend: PartialBackend = backend
        self.method, self.group = method, group.group_name
        self.kernel: PartialBackend = "cpu" if device.type == "cpu" else backend
        """The kernel that runs."""

    def mask(self, documents: Tensor | None) -> Tensor | None:
        """Argument `mask` of `forward`: documents [degree, batch, part] of all ranks; None is causal."""
        return None if documents is None else gather_documents(documents, self.group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries [batch, heads, part, head_dim] to all earlier positions."""
        out, _ = context_attention(query, key, value, mask, self.kernel, self.method, self.group)
        return out


# An operator of its own is opaque to the compiler, which would otherwise break its graph at every message.
@torch.library.custom_op("titan_exp::context_attention", mutates_args=())
def context_attention(  # noqa: PLR0917  # operators take arguments by place
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, backend: str, method: str, group: str
) -> tuple[Tensor, Tensor]:
    """Output in the type of `query`, and log-sum-exp [batch, heads, part] in fp32; arguments as of the class above."""
    exchange = _exchange(method, group)
    out = lse = None
    for rank, (k, v) in exchange.blocks(torch.stack((key, value))):
        rows, keys, causal = _visible(exchange.rank, rank, query.shape[2])
        part, part_lse = attention_forward(
            query[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            bias=_bias(documents, exchange.rank, rank, query.dtype),
            causal=causal and documents is None,
            backend=cast("PartialBackend", backend),
        )
        if out is None or lse is None:
            out, lse = part.float(), part_lse.clone(memory_format=torch.contiguous_format)
        else:
            merge_lse(out[:, :, rows], lse[:, :, rows], part, part_lse)
    assert out is not None, "the own block comes first"
    assert lse is not None
    return _like_projection(query).copy_(out), lse


@torch.library.custom_op("titan_exp::context_attention_backward", mutates_args=())
def context_attention_backward(  # noqa: PLR0917  # operators take arguments by place
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, summed in fp32 over blocks and ranks."""
    exchange = _exchange(method, group)
    by_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for rank, (k, v) in exchange.blocks(torch.stack((key, value))):
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
        )
        by_query[:, :, rows] += dq
        by_block = torch.zeros((2, *key.shape), dtype=torch.float32, device=key.device)
        by_block[0, :, :, keys], by_block[1, :, :, keys] = dk, dv
        exchange.accumulate_grad(rank, by_block)
    by_key, by_value = exchange.reduced_grad().to(key.dtype).unbind(0)
    return by_query.to(query.dtype), by_key.contiguous(), by_value.clone()


@context_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like_projection(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@context_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, documents, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, documents, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*context_attention_backward(gradient, *ctx.saved_tensors, *ctx.how), None, None, None, None)


context_attention.register_autograd(_backward, setup_context=_save)


def _exchange(method: str, group: str) -> RingKV | AllGatherKV:
    return (RingKV if method == "ring" else AllGatherKV)(group_named(group))


def _visible(rank: int, other: int, length: int) -> tuple[slice, slice, bool]:
    """Rows of a rank and keys of another's block that attend, each block `length` long, and True if causal."""
    everything, tail = slice(0, length), slice(length // 2, length)
    if other == rank:
        return everything, everything, True
    # A chunk from nearer the head than mine has its partner nearer the tail.
    return (everything, slice(0, length // 2), False) if other < rank else (tail, everything, False)


def _bias(documents: Tensor | None, rank: int, other: int, dtype: torch.dtype) -> Tensor | None:
    """Mask of other documents, [batch, 1, rows, keys], and of later tokens within the own block."""
    if documents is None:
        return None
    rows, keys, causal = _visible(rank, other, documents.shape[2])
    hidden = documents[rank][:, rows, None] != documents[other][:, None, keys]
    if causal:
        hidden |= torch.ones(hidden.shape[1:], dtype=torch.bool, device=hidden.device).triu(1)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, HIDDEN)[:, None]


def _like_projection(query: Tensor) -> Tensor:
    """Empty heads [batch, heads, part, head_dim] that lie token by token, as the next projection reads them."""
    batch, heads, part, head_dim = query.shape
    return query.new_empty((batch, part, heads, head_dim)).transpose(1, 2)
