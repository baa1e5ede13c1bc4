"""Ulysses attention: all-to-all between contiguous sequence parts and heads (Jacobs et al. 2023).

Inside attention a rank has the whole sequence of some heads, so kernels and masks work as on one device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.all_to_all import all_to_all
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.process_groups import gather_documents


class UlyssesAttention(nn.Module):
    """Replaces `CausalAttention`, with the same arguments, each this rank's part of the sequence.

    `core` attends over the joint sequence of the ranks in `group`, whose number must divide query heads and key-value
    heads.
    """

    def __init__(self, core: CausalAttention | ContextAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.degree, self.rank, self.group = group.size(), group.rank(), group.group_name

    @property
    def pattern(self) -> MaskPattern:
        """Visible keys, beside documents."""
        return self.core.pattern

    def mask(
        self,
        documents: Tensor | None,
        positions: Tensor | None = None,
        *,
        seq: int = 0,
        device: torch.device | None = None,
    ) -> Any:
        """Argument `mask` of `forward`: the core's mask for the joint sequence; None for causal attention.

        `positions` are given if they start again within the sequence; `seq` tokens are this rank's.
        """
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
        # Each rank's heads of query, key and value, [degree, batch, part, channels], in one message.
        by_rank = [self._channels(heads) for heads in (query, key, value)]
        received = all_to_all(torch.cat(by_rank, dim=-1), self.group).movedim(0, 1).flatten(1, 2)
        channels = received.split([part.shape[-1] for part in by_rank], dim=-1)
        widths = (heads.shape[-1] for heads in (query, key, value))
        whole = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part, width in zip(channels, widths, strict=True))
        out = self.core(*whole, mask, sinks).unflatten(2, (self.degree, -1))
        return all_to_all(out.movedim(2, 0).contiguous(), self.group).movedim(0, 1).flatten(1, 2)

    def _channels(self, heads: Tensor) -> Tensor:
        """Heads [batch, heads, part, width] as channels of the ranks, [degree, batch, part, heads / degree · width]."""
        return heads.transpose(1, 2).unflatten(2, (self.degree, -1)).flatten(3).movedim(2, 0)
