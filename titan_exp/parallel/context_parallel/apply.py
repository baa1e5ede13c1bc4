"""Context parallelism: each rank holds a part of every sequence; attention exchanges keys and values, or heads.

Linear attention exchanges the affine maps of segments, not tokens. A segment is a run of adjacent tokens on one rank:
one for a contiguous shard, two for a zigzag one, more with cuts. The state after a segment is A · S + B, if it was S
before. So every rank gathers the maps of all segments, applies those of the earlier ones to a zero state, and runs its
segments from the states found. Backward applies the transposed maps from the last segment on. The maps of a segment in
which a document starts have A = 0, without a special case.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from titan_exp.models.blocks.transformer import attentions_of, iter_blocks
from titan_exp.ops import linear_attention
from titan_exp.ops.attention.attention_with_lse import PartialBackend
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention, GatheredLatents
from titan_exp.parallel.context_parallel.load_balance import ShardedSequence, head_tail_pieces
from titan_exp.parallel.mesh import Mesh, all_gather, all_to_all, gather_documents, gather_into, group_named


def gather_sequence(part: Tensor, mesh: Mesh) -> Tensor:
    """Gather whole sequences [rows, seq, ...] from the ranks' parts [rows, seq / cp, ...]; the inverse of
    `ShardedSequence.take`. All ranks that share the sequences must call it."""
    shards = mesh.sequence_shard
    # A rank's part is a piece of its group's part, which is a piece of the sequence.
    for shard, axis in ((shards.within, "cp_within"), (shards.across, "cp_across")):
        if shard.degree == 1:
            continue
        length = part.shape[1] * shard.degree
        positions = torch.arange(length)[None]
        order = torch.cat([replace(shard, rank=rank).take(positions)[0] for rank in range(shard.degree)])
        parts = all_gather(part.movedim(1, 0), shard.degree, mesh.world[axis].get_group().group_name)
        part = parts[order.argsort().to(part.device)].movedim(0, 1)
    return part


class UlyssesAttention(nn.Module):
    """Ulysses attention: replaces `CausalAttention`, for this rank's part of the sequence. `core` attends over the
    joint sequence of `group`, whose size must divide query and key-value heads."""

    def __init__(self, core: CausalAttention | ContextAttention, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.degree, self.rank, self.group = group.size(), group.rank(), group.group_name

    @property
    def pattern(self) -> MaskPattern:
        """Mask pattern: the visible keys, documents aside."""
        return self.core.pattern

    def mask(
        self,
        documents: Tensor | None,
        positions: Tensor | None = None,
        *,
        seq: int = 0,
        device: torch.device | None = None,
    ) -> Any:
        """Build the argument `mask` of `forward`: the core's mask for the joint sequence, or None for causal attention.
        `positions` are given if they restart within the sequence; `seq` counts this rank's tokens."""
        if self.pattern.chunk is None:
            positions = None
        documents, positions = (
            None if ids is None else gather_documents(ids, self.group).movedim(0, 1).flatten(1, 2)
            for ids in (documents, positions)
        )
        return self.core.mask(documents, positions, seq=self.degree * seq, device=device)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from this rank's queries [batch, heads, part, head_dim] to all visible positions."""
        if sinks is not None:
            sinks = sinks.chunk(self.degree)[self.rank]
        # One message carries the heads of query, key and value for each rank, [degree, batch, part, channels].
        by_rank = [
            heads.transpose(1, 2).unflatten(2, (self.degree, -1)).flatten(3).movedim(2, 0)
            for heads in (query, key, value)
        ]
        received = all_to_all(torch.cat(by_rank, dim=-1), self.group).movedim(0, 1).flatten(1, 2)
        channels = received.split([part.shape[-1] for part in by_rank], dim=-1)
        widths = (heads.shape[-1] for heads in (query, key, value))
        whole = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part, width in zip(channels, widths, strict=True))
        out = self.core(*whole, mask, sinks).unflatten(2, (self.degree, -1))
        return all_to_all(out.movedim(2, 0).contiguous(), self.group).movedim(0, 1).flatten(1, 2)


def apply_context_parallel(model: nn.Module, mesh: Mesh, method: Literal["ring", "allgather", "ulysses"]) -> None:
    """Replace every block's attention cores, and cores of linear attention, by context-parallel ones, in place. Only
    cores mix tokens, so the rest of a block stays. Does nothing if all cp axes have size 1."""
    if mesh.sequence_shard.degree == 1:
        return
    across, within = mesh.world["cp_across"], mesh.world["cp_within"]
    for block in iter_blocks(model):
        shard_linear_attention(block, mesh)
    for attention in [module for block in iter_blocks(model) for module in attentions_of(block)]:
        core = cast("CausalAttention", attention.core)
        if across.size() > 1:
            assert method != "ulysses", "all ranks exchange heads"
            backend, exchange = cast("PartialBackend", core.backend), method
            if method == "allgather" and within.size() == 1 and hasattr(attention, "latent_gather"):
                attention.latent_gather, exchange = GatheredLatents(across.get_group()), "whole"
            group, cuts = across.get_group(), mesh.sequence_shard.across.cuts
            core = ContextAttention(backend, exchange, group, mesh.device, core.scale, core.pattern, cuts)
        attention.core = UlyssesAttention(core, within.get_group()) if within.size() > 1 else core


@dataclass(frozen=True)
class Segments:
    """Segments of a sequence over ranks."""

    slices: list[slice]  # places of this rank's segments among its tokens, in order
    own: list[int]  # index of each of them among the segments of all ranks, in the order of the sequence
    order: list[int]
    """Place of each of all segments among the gathered ones: its rank times `slots`, plus its index on the rank."""
    slots: int  # largest number of segments on a rank

    def stacked(self, parts: list[Tensor]) -> Tensor:
        """Stack this rank's tensors, filled up to `slots` with zeros."""
        return torch.stack([*parts, *[torch.zeros_like(parts[0])] * (self.slots - len(parts))])


def segments_of(shards: ShardedSequence, length: int) -> Segments:
    """Segments of sequences of which each rank has `length` tokens."""
    across, within = shards.across, shards.within
    seq, rank, slots = length * shards.degree, across.rank * within.degree + within.rank, 0
    found: list[tuple[int, int, int]] = []
    slices: list[slice] = []
    for holder in range(shards.degree):
        # A group's part is its pieces one after another, of which the holder has the tokens from `first` on.
        first, place, index = holder % within.degree * length, 0, 0
        group, part = holder // within.degree, seq // across.degree
        pieces = (range(group * part, (group + 1) * part),)
        if across.degree > 1 and across.zigzag:
            pieces = head_tail_pieces(group, across.degree, seq, across.cuts)
        for piece in pieces:
            start, end = max(place, first), min(place + len(piece), first + length)
            if start < end:
                found.append((piece.start + start - place, holder, index))
                index += 1
                if holder == rank:
                    slices.append(slice(start - first, end - first))
            place += len(piece)
        slots = max(slots, index)
    found.sort()
    own = [place for place, (_, holder, _) in enumerate(found) if holder == rank]
    return Segments(slices, own, [holder * slots + index for _, holder, index in found], slots)


class SegmentExchange:
    """Ranks that share sequences, and their shards."""

    def __init__(self, mesh: Mesh) -> None:
        self.shards = mesh.sequence_shard
        self.groups = [
            mesh.world[axis].get_group().group_name if mesh.world[axis].size() > 1 else ""
            for axis in ("cp_within", "cp_across")
        ]

    def previous(self, segments: Segments, ends: list[Tensor]) -> Tensor:
        """End of the segment before each of this rank's segments, by that segment's rank; zeros before the first."""
        return neighbours(segments.stacked(ends), segments.order, segments.own, -1, *self.groups)

    def documents_before(self, segments: Segments, documents: Tensor | None, count: int) -> list[Tensor] | list[None]:
        """Documents [batch, count] of the tokens in front of each of this rank's segments, -1 for none."""
        if documents is None:
            return [None] * len(segments.slices)
        ends = [documents[:, at.stop - count : at.stop] + 1 for at in segments.slices]
        return list((self.previous(segments, ends) - 1).unbind())


class ContextGatedDelta(nn.Module):
    """Replaces `GatedDeltaCore`, with the same arguments for this rank's part of the sequence."""

    def __init__(self, core: linear_attention.GatedDeltaCore, exchange: SegmentExchange) -> None:
        super().__init__()
        self.backend: linear_attention.LinearAttentionBackend = core.backend
        self.chunk, self.exchange = core.chunk, exchange

    def forward(  # noqa: PLR0917  # as of the core
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Outputs [batch, part, value_heads, V] of this rank's tokens."""
        segments = segments_of(self.exchange.shards, v.shape[1])
        carries = self.exchange.documents_before(segments, documents, 1)
        run = partial(linear_attention.gated_delta, chunk=self.chunk, backend=self.backend)
        map_of = partial(linear_attention.transition, chunk=self.chunk, backend=self.backend)
        calls = []
        for at, before in zip(segments.slices, carries, strict=True):
            part = [None if x is None else x[:, at] for x in (q, k, v, g, beta, documents)]
            calls.append((part, None if before is None else before[:, 0]))
        maps = segments.stacked([map_of(*part[1:], carry=carry) for part, carry in calls])
        states = states_before(maps, v.shape[-1], segments.order, segments.own, *self.exchange.groups)
        found = zip(calls, states, strict=True)
        return torch.cat([run(*part, state=state, carry=carry)[0] for (part, carry), state in found], dim=1)


class ContextShortConvolution(nn.Module):
    """Replaces `ShortConvolutionCore`, with the same arguments for this rank's part of the sequence."""

    def __init__(self, exchange: SegmentExchange) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(self, x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
        """Convolve this rank's tokens [batch, part, channels]; the inputs before a segment come from another rank."""
        segments, reach = segments_of(self.exchange.shards, x.shape[1]), weight.shape[1] - 1
        if not reach:
            return linear_attention.short_convolution(x, weight, None)
        # Otherwise inputs would come from more than one segment.
        assert min(at.stop - at.start for at in segments.slices) >= reach, "segments are as long as the filter reaches"
        before = self.exchange.previous(segments, [x[:, at.stop - reach : at.stop] for at in segments.slices])
        ids = self.exchange.documents_before(segments, documents, reach)
        parts = []
        for at, inputs, known in zip(segments.slices, before, ids, strict=True):
            own = None if documents is None else documents[:, at]
            parts.append(linear_attention.short_convolution(x[:, at], weight, own, inputs, known))
        return torch.cat(parts, dim=1)


def shard_linear_attention(block: nn.Module, mesh: Mesh) -> None:
    """Replace a block's cores of linear attention by context-parallel ones, in place."""
    exchange = SegmentExchange(mesh)
    for module in list(block.modules()):
        for name, core in list(module.named_children()):
            if isinstance(core, linear_attention.GatedDeltaCore):
                setattr(module, name, ContextGatedDelta(core, exchange))
            elif isinstance(core, linear_attention.ShortConvolutionCore):
                setattr(module, name, ContextShortConvolution(exchange))


# Custom ops are opaque to the compiler, which would otherwise break the graph at every message.
@torch.library.custom_op("titan_exp::linear_attention_neighbours", mutates_args=())
def neighbours(  # noqa: PLR0917  # custom ops take positional arguments
    ends: Tensor, order: list[int], own: list[int], step: int, within: str, across: str
) -> Tensor:
    """For each of this rank's segments, the row of `ends` [slots, ...] of the segment `step` places on; else zeros."""
    gathered = _gather(ends, within, across)
    places = [place + step for place in own]
    rows = [gathered[order[at]] if 0 <= at < len(order) else torch.zeros_like(ends[0]) for at in places]
    return torch.stack(rows)


@torch.library.custom_op("titan_exp::linear_attention_states", mutates_args=())
def states_before(  # noqa: PLR0917  # custom ops take positional arguments
    maps: Tensor, width: int, order: list[int], own: list[int], within: str, across: str
) -> Tensor:
    """States [own, batch, heads, K, width] before this rank's segments, from the maps [B | A] of its segments."""
    gathered, state, found = _gather(maps, within, across), torch.zeros_like(maps[0, ..., :width]), []
    for place in range(own[-1] + 1):
        if place in own:
            found.append(state)
        written, kept = gathered[order[place]].tensor_split([width], dim=-1)
        state = kept @ state + written
    return torch.stack(found)


@torch.library.custom_op("titan_exp::linear_attention_states_backward", mutates_args=())
def states_before_backward(  # noqa: PLR0917  # custom ops take positional arguments
    gradient: Tensor, states: Tensor, maps: Tensor, order: list[int], own: list[int], within: str, across: str
) -> Tensor:
    """Gradient of this rank's maps, from those of the states before the segments of all ranks."""
    width, slots = states.shape[-1], maps.shape[0]
    padding = gradient.new_zeros(slots - len(own), *gradient.shape[1:])
    gathered = _gather(torch.cat((torch.cat((gradient, padding)), maps[..., width:]), dim=-1), within, across)
    found, after = torch.zeros_like(maps), torch.zeros_like(states[0])
    for place in reversed(range(own[0], len(order))):
        if place in own:
            index = own.index(place)
            found[index] = torch.cat((after, after @ states[index].mT), dim=-1)
        change, kept = gathered[order[place]].tensor_split([width], dim=-1)
        after = change + kept.mT @ after
    return found


def _gather(parts: Tensor, *groups: str) -> Tensor:
    """Concatenate the ranks' tensors [n, ...] in the order of ranks, the last group varying slowest."""
    for name in groups:
        if name:
            group = group_named(name)
            gathered = parts.new_empty(group.size() * parts.shape[0], *parts.shape[1:])
            gather_into(gathered, parts.contiguous(), group=group)
            parts = gathered
    return parts


@neighbours.register_fake
def _(ends: Tensor, order: list[int], own: list[int], *_: Any) -> Tensor:
    return ends.new_empty(len(own), *ends.shape[1:])


@states_before.register_fake
def _(maps: Tensor, width: int, order: list[int], own: list[int], *_: Any) -> Tensor:
    return maps.new_empty(len(own), *maps.shape[1:-1], width)


@states_before_backward.register_fake
def _(gradient: Tensor, states: Tensor, maps: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(maps)


def _save_neighbours(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ends, *ctx.how = inputs
    ctx.slots = ends.shape[0]


def _neighbours_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    order, own, step, *groups = ctx.how
    padding = gradient.new_zeros(ctx.slots - len(own), *gradient.shape[1:])
    found = neighbours(torch.cat((gradient, padding)), order, own, -step, *groups)
    return (torch.cat((found, padding)), *(None,) * 5)


def _save_states(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    maps, _, *ctx.how = inputs
    ctx.save_for_backward(output, maps)


neighbours.register_autograd(_neighbours_backward, setup_context=_save_neighbours)
states_before.register_autograd(
    lambda ctx, gradient: (states_before_backward(gradient, *ctx.saved_tensors, *ctx.how), *(None,) * 5),
    setup_context=_save_states,
)
