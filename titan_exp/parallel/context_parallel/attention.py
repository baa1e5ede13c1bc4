"""Attention over a sharded sequence, zigzag if it is causal; keys and values move by ring or all-gather.

A rank's queries attend causally to their own block and to the earlier tokens of every other block. Within a segment,
these are the head piece of every earlier rank and, for tail queries, the whole block of every later rank. So no kernel
computes hidden scores, and without documents no mask is needed. A window or chunks are computed by tiles of the ranks'
pieces; a block without visible keys is skipped. Partial outputs are merged by log-sum-exp, and sinks after all of them.
"""

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.ops.attention.attention_with_lse import (
    HIDDEN,
    MaxLogits,
    PartialBackend,
    additive,
    attention_backward,
    attention_forward,
    merge_lse,
    merge_sinks,
    raise_to_logits,
    sinks_grad,
)
from titan_exp.ops.attention.mask_pattern import CAUSAL, FULL, MaskPattern, Tile
from titan_exp.ops.attention.sdpa import segment_ids
from titan_exp.ops.autograd import is_recomputing
from titan_exp.parallel.context_parallel.load_balance import Pieces, head_tail_pieces
from titan_exp.parallel.mesh import all_gather, gather_documents, gather_into, group_named, reduce_scatter, scatter_sums


class GatheredLatents(nn.Module):
    """Replaces `LatentGather`: latents of all ranks, and their gradient summed over ranks in fp32."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.degree = group.group_name, group.size()

    def forward(self, latents: Tensor) -> Tensor:
        """Gather [batch, part, width] into [batch, degree · part, width], the ranks' parts in order."""
        return _GatherLatents.apply(latents, self.degree, self.group)  # type: ignore[return-value]  # a Tensor


class WholeKV:
    """Keys and values of the whole sequence, which every rank has, cut into blocks by rank."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.degree, self._gradients = group.rank(), group.size(), dict[int, Tensor]()

    def blocks(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield every rank's block [batch, heads, part, width] with its rank, the own block first."""
        keys, values = key.chunk(self.degree, dim=2), value.chunk(self.degree, dim=2)
        for step in range(self.degree):
            rank = (self.rank - step) % self.degree
            yield rank, keys[rank], values[rank]

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Store this rank's gradient of a block."""
        self._gradients[rank] = gradient

    def reduced_grad(self) -> Tensor:
        """Return the gradient of all blocks, for this rank's queries alone: the latents sum it over ranks."""
        return torch.cat([self._gradients[rank] for rank in range(self.degree)], dim=2)


class _GatherLatents(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latents: Tensor, degree: int, group: str) -> Tensor:
        ctx.degree, ctx.group = degree, group
        return all_gather(latents, degree, group).unflatten(0, (degree, -1)).movedim(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = gradients[0].float().unflatten(1, (ctx.degree, -1)).movedim(1, 0).flatten(0, 1)
        return reduce_scatter(parts, ctx.degree, ctx.group).to(gradients[0].dtype), None, None


class RingKV:
    """Rotates the keys and values of all ranks once around the group; their gradients follow one step behind."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradient: _Transfer | None = None

    def blocks(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (source rank, block), the local block first. Every rank must exhaust the iterator."""
        block = local
        for step in range(self.degree):
            transfer = _Transfer(block, self.group) if step < self.degree - 1 else None
            yield (self.rank - step) % self.degree, block
            if transfer is not None:
                block = transfer.wait()

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Add to the gradient of the block that `blocks` yielded last, and send it to the next rank."""
        if self._gradient is not None:
            gradient = gradient + self._gradient.wait()
        self._gradient = _Transfer(gradient, self.group)

    def reduced_grad(self) -> Tensor:
        """Return the gradient of the local block, summed over ranks; call it after the last block."""
        assert self._gradient is not None, "no block was processed"
        return self._gradient.wait()


class _Transfer:
    """Transfer to the next rank of the group and from the previous one."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        # Keeps the sent buffer alive until the transfer has finished.
        self._sent, self._received = tensor, torch.empty_like(tensor)
        next_rank, previous_rank = ((rank + step) % degree for step in (1, -1))
        send = dist.P2POp(dist.isend, tensor, group=group, group_peer=next_rank)
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=previous_rank)
        self._work = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """Wait for the transfer; returns the buffer received from the previous rank."""
        for work in self._work:
            work.wait()
        return self._received


class AllGatherKV:
    """Gathers all keys and values in one message, overlapped with attention to the own block."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradients: Tensor | None = None

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's block with its rank, the own block first."""
        gathered = own.new_empty((self.degree * own.shape[0], *own.shape[1:]))
        work = gather_into(gathered, own, group=self.group, async_op=True)
        yield self.rank, own
        assert work is not None, "every rank of the group takes part"
        work.wait()
        for step in range(1, self.degree):
            rank = (self.rank - step) % self.degree
            yield rank, gathered.unflatten(0, (self.degree, -1))[rank]

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Store this rank's gradient of the block that `blocks` yielded last."""
        if self._gradients is None:
            self._gradients = gradient.new_empty((self.degree, *gradient.shape))
        self._gradients[rank] = gradient

    def reduced_grad(self) -> Tensor:
        """Sum the gradient of the own block over ranks, after all blocks."""
        assert self._gradients is not None, "no block was processed"
        own = torch.empty_like(self._gradients[0])
        scatter_sums(own, self._gradients.flatten(0, 1), group=self.group)
        return own


ExchangeMethod = Literal["ring", "allgather", "whole"]
"""Exchange of keys and values; `whole` exchanges nothing, since every rank has them."""


class ContextMask(NamedTuple):
    """Mask of a context-parallel rank."""

    segments: Tensor | None
    """Ids of all ranks [degree, batch, part], equal for tokens that may see each other; None for one segment."""
    pattern: MaskPattern  # visible keys within a segment


class ContextAttention(nn.Module):
    """Ring or all-gather attention: replaces `CausalAttention` for this rank's part of the sequence."""

    def __init__(  # noqa: PLR0917  # one line in `apply`
        self,
        backend: PartialBackend,
        method: ExchangeMethod,
        group: dist.ProcessGroup,
        device: torch.device,
        scale: float | None = None,
        pattern: MaskPattern = CAUSAL,
        cuts: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.backend: PartialBackend = backend
        self.scale, self.pattern, self.cuts = scale, pattern, list(cuts)
        self.method, self.group = method, group.group_name
        self.kernel: PartialBackend = "cpu" if device.type == "cpu" else backend
        self.max_logits: MaxLogits | None = None
        """Tracks the largest logit of each head, for QK-Clip."""

    def mask(
        self,
        documents: Tensor | None,
        positions: Tensor | None = None,
        *,
        seq: int = 0,
        device: torch.device | None = None,
    ) -> ContextMask | None:
        """Build the `mask` of `forward` for this rank's `seq` tokens, with restarting `positions`; None if causal."""
        ranks = group_named(self.group)
        part = seq if documents is None else documents.shape[1]
        pattern, index = self.pattern.within(part * ranks.size()), None
        if positions is not None:
            pieces = head_tail_pieces(ranks.rank(), ranks.size(), part * ranks.size(), self.cuts)
            index = _places(pieces, positions.device)
        segments, pattern = segment_ids(pattern, documents, positions, index)
        if segments is None and pattern.is_causal:
            return None
        return ContextMask(None if segments is None else gather_documents(segments, self.group), pattern)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: ContextMask | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from this rank's queries [batch, heads, part, head_dim] to all visible positions."""
        segments, pattern = mask or ContextMask(None, CAUSAL if self.pattern.causal else FULL)
        tracked = self.max_logits is not None and torch.is_grad_enabled()
        exchange = (self.kernel, self.method, self.group, self.scale)
        visible = (pattern.window, pattern.chunk, self.cuts, pattern.causal)
        out, _, found = context_attention(query, key, value, segments, sinks, *exchange, *visible, tracked)
        if self.max_logits is not None and tracked:
            self.max_logits.add(found)
        return out


# A custom op is opaque to the compiler, which would otherwise break the graph at every message.
@torch.library.custom_op("titan_exp::context_attention", mutates_args=())
def context_attention(  # noqa: PLR0917  # custom ops take positional arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    backend: str,
    method: str,
    group: str,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    cuts: list[int],
    causal: bool,
    tracked: bool,  # custom ops take positional arguments
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output in the dtype of `query`, and the log-sum-exp [batch, heads, part] in fp32, sinks included. If
    `tracked`, the third result [heads] in fp32 is each head's largest logit over these queries and the keys of all
    ranks, -inf in recomputation; else it is empty."""
    exchange, pattern = _exchange(method, group), MaskPattern(window, chunk, causal)
    largest = _no_logits(query, tracked=tracked)
    own, out, lse = _pieces(exchange, exchange.rank, query, cuts, pattern), None, None
    for rank, k, v in _blocks(exchange, key, value):
        other = _pieces(exchange, rank, query, cuts, pattern)
        for tile in _tiles(pattern, own, other):
            rows, keys, is_triangle = query[:, :, tile.rows], k[:, :, tile.keys], tile.kind == "causal"
            bias = _bias(pattern, _segments(segments, exchange, rank), tile, own=own, other=other, query=query)
            if tracked and not is_recomputing():
                factor = query.shape[-1] ** -0.5 if scale is None else scale
                visible = None if bias is None else bias == 0
                raise_to_logits(largest, rows, keys, visible, causal=is_triangle and bias is None, scale=factor)
            part, part_lse = attention_forward(
                rows,
                keys,
                v[:, :, tile.keys],
                bias=bias,
                causal=is_triangle and segments is None,
                backend=cast("PartialBackend", backend),
                scale=scale,
            )
            if out is None or lse is None:
                if part.shape[2] == query.shape[2]:
                    out, lse = part.float(), part_lse.clone(memory_format=torch.contiguous_format)
                    continue
                out = part.new_zeros((*query.shape[:3], value.shape[-1]), dtype=torch.float32)
                lse = part_lse.new_full(query.shape[:3], HIDDEN)
            merge_lse(out[:, :, tile.rows], lse[:, :, tile.rows], part, part_lse)
    assert out is not None, "the own block comes first"
    assert lse is not None
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return _like_projection(query, value).copy_(out), lse, largest


@torch.library.custom_op("titan_exp::context_attention_backward", mutates_args=())
def context_attention_backward(  # noqa: PLR0917  # custom ops take positional arguments
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    backend: str,
    method: str,
    group: str,
    scale: float | None,
    window: int | None,
    chunk: int | None,
    cuts: list[int],
    causal: bool,  # custom ops take positional arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, summed in fp32 over blocks and ranks, and of sinks for these queries."""
    exchange, pattern = _exchange(method, group), MaskPattern(window, chunk, causal)
    query_grad = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    own = _pieces(exchange, exchange.rank, query, cuts, pattern)
    for rank, k, v in _blocks(exchange, key, value):
        block_grad = key.new_zeros((*k.shape[:-1], k.shape[-1] + v.shape[-1]), dtype=torch.float32)
        key_grad, value_grad = _split(block_grad, key)
        other = _pieces(exchange, rank, query, cuts, pattern)
        for tile in _tiles(pattern, own, other):
            dq, dk, dv = attention_backward(
                gradient[:, :, tile.rows],
                query[:, :, tile.rows],
                k[:, :, tile.keys],
                v[:, :, tile.keys],
                out=out[:, :, tile.rows],
                lse=lse[:, :, tile.rows],
                bias=_bias(pattern, _segments(segments, exchange, rank), tile, own=own, other=other, query=query),
                causal=tile.kind == "causal" and segments is None,
                backend=cast("PartialBackend", backend),
                scale=scale,
            )
            query_grad[:, :, tile.rows].add_(dq)
            key_grad[:, :, tile.keys].add_(dk)
            value_grad[:, :, tile.keys].add_(dv)
        exchange.accumulate_grad(rank, block_grad)
    key_grad, value_grad = _split(exchange.reduced_grad(), key)
    # Results of an operator share no memory: slices are copied even in fp32.
    key_grad, value_grad = (grad.to(key.dtype).contiguous() for grad in (key_grad, value_grad))
    of_sinks = query.new_empty(0) if sinks is None else sinks_grad(gradient, out, lse, sinks)
    return query_grad.to(query.dtype), key_grad, value_grad, of_sinks


@context_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *how: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _like_projection(query, value), lse, _no_logits(query, tracked=how[-1])


@context_attention_backward.register_fake
def _(  # noqa: PLR0917  # as the operator
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, segments: Any, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, segments, sinks, *ctx.how, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(query, key, value, segments, sinks, *output[:2])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
    *of_heads, of_sinks = context_attention_backward(gradient, *saved, *ctx.how)
    return (*of_heads, None, None if saved[4] is None else of_sinks, *(None,) * 9)


context_attention.register_autograd(_backward, setup_context=_save)


def _exchange(method: str, group: str) -> RingKV | AllGatherKV | WholeKV:
    kinds = {"ring": RingKV, "allgather": AllGatherKV, "whole": WholeKV}
    return kinds[method](group_named(group))


def _blocks(
    exchange: RingKV | AllGatherKV | WholeKV, key: Tensor, value: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield source rank, keys and values of every block, the own block first."""
    if isinstance(exchange, WholeKV):
        yield from exchange.blocks(key, value)
        return
    for rank, block in exchange.blocks(torch.cat((key, value), dim=-1)):
        yield rank, *_split(block, key)


def _pieces(
    exchange: RingKV | AllGatherKV | WholeKV, rank: int, query: Tensor, cuts: list[int], pattern: MaskPattern
) -> Pieces:
    if not pattern.causal:
        return (range(rank * query.shape[2], (rank + 1) * query.shape[2]),)
    return head_tail_pieces(rank, exchange.degree, exchange.degree * query.shape[2], cuts)


def _tiles(pattern: MaskPattern, own: Pieces, other: Pieces) -> Iterator[Tile]:
    """Yield the tiles of two ranks' blocks, queries by keys, that have visible pairs."""
    if not pattern.causal:
        yield Tile(0, sum(map(len, own)), 0, sum(map(len, other)), "whole")
    elif not pattern.is_causal:
        for row, queries in zip(_offsets(own), own, strict=False):
            for key, keys in zip(_offsets(other), other, strict=False):
                for first, end, first_key, end_key, kind in pattern.tiles(queries, keys):
                    yield Tile(row + first, row + end, key + first_key, key + end_key, kind)
    elif own == other:
        length = sum(map(len, own))
        yield Tile(0, length, 0, length, "causal")
    else:
        earlier = [sum(len(keys) for keys in other if keys.stop <= queries.start) for queries in own]
        for count, rows in groupby(zip(earlier, _offsets(own), own, strict=False), key=lambda row: row[0]):
            starts, pieces = zip(*((start, piece) for _, start, piece in rows), strict=True)
            if count:
                yield Tile(starts[0], starts[-1] + len(pieces[-1]), 0, count, "whole")


def _offsets(pieces: Pieces) -> list[int]:
    """Offset of each piece's first token in the block, then the length of the block."""
    return list(accumulate(map(len, pieces), initial=0))


def _places(pieces: Pieces, device: torch.device) -> Tensor:
    """Positions in the sequence of a block's tokens [length]."""
    return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])


def _segments(
    segments: Tensor | None, exchange: RingKV | AllGatherKV | WholeKV, other: int
) -> tuple[Tensor, Tensor] | None:
    """Segment ids [batch, part] of this rank's tokens and of another rank's."""
    return None if segments is None else (segments[exchange.rank], segments[other])


def _bias(
    pattern: MaskPattern,
    segments: tuple[Tensor, Tensor] | None,
    tile: Tile,
    *,
    own: Pieces,
    other: Pieces,
    query: Tensor,
) -> Tensor | None:
    """Additive mask [batch_or_1, 1, rows, keys] of a tile; None if the kind of tile implies it."""
    if segments is None and tile.kind != "masked":
        return None
    rows, keys = _places(own, query.device)[tile.rows], _places(other, query.device)[tile.keys]
    visible = pattern.visible(rows[:, None], keys)[None]
    if segments is not None:
        visible = visible & (segments[0][:, tile.rows, None] == segments[1][:, None, tile.keys])
    return additive(visible[:, None], query)


def _no_logits(query: Tensor, *, tracked: bool) -> Tensor:
    """Initial largest logits [heads] in fp32; empty if they are not tracked."""
    return query.new_full((query.shape[1] if tracked else 0,), -torch.inf, dtype=torch.float32)


def _split(block: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Split a tensor into the keys and values [batch, kv_heads, part, width] that it joins, of different widths."""
    width = key.shape[-1]
    return block[..., :width], block[..., width:]


def _like_projection(query: Tensor, value: Tensor) -> Tensor:
    """Empty output [batch, heads, part, v_dim], contiguous per token because the output projection reads it so."""
    batch, heads, part, _ = query.shape
    return query.new_empty((batch, part, heads, value.shape[-1])).transpose(1, 2)
