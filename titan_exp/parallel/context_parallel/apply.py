"""Context parallelism: each rank holds a part of every sequence; attention exchanges keys and values, or heads."""

from dataclasses import replace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.models.blocks.transformer import attentions_of, iter_blocks
from titan_exp.ops.attention.attention_with_lse import PartialBackend
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention, GatheredLatents
from titan_exp.parallel.context_parallel.linear_attention import shard_linear_attention
from titan_exp.parallel.mesh import Mesh, all_gather, all_to_all, gather_documents


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

    def __init__(self, core: CausalAttention | ContextAttention, group: dist.ProcessGroup) -> None:
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
