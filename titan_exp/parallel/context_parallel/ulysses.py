"""Causal attention over a sequence cut into contiguous parts, by exchanging heads for sequence (Jacobs et al. 2023).

Within attention a rank has the whole sequence of a part of the heads, so every kernel and every mask works as it does
on one device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.process_groups import gather_documents, group_named


class UlyssesAttention(nn.Module):
    """Takes the place of `CausalAttention`, with the same arguments, each of them this rank's part.

    Args:
        core: attention over what the ranks have together: a whole sequence, or a part that is shared with other ranks.
        group: the ranks that exchange heads; their number divides query heads and key-value heads.
    """

    def __init__(self, core: CausalAttention | ContextAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.whole = core
        self.degree, self.group = group.size(), group.group_name

    def mask(self, documents: Tensor | None) -> Any:
        """Argument `mask` of `forward`: the mask of the ranks' joint sequence; None is causal."""
        if documents is None:
            return None
        return self.whole.mask(gather_documents(documents, self.group).movedim(0, 1).flatten(1, 2))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        """Attention of this rank's queries [batch, heads, part, head_dim] to all earlier positions."""
        # [batch, degree, heads of a rank, part, head_dim]; all three in one message.
        by_rank = [heads.unflatten(1, (self.degree, -1)) for heads in (query, key, value)]
        sizes = [heads.shape[2] for heads in by_rank]
        received = all_to_all(torch.cat(by_rank, dim=2).movedim(1, 0).contiguous(), self.group)
        whole = received.movedim(0, 2).flatten(2, 3).split(sizes, dim=1)
        out = self.whole(*whole, mask).unflatten(2, (self.degree, -1))
        return all_to_all(out.movedim(2, 0).contiguous(), self.group).movedim(0, 1).flatten(1, 2)


# An operator of its own is opaque to the compiler, which would otherwise break its graph at the message.
@torch.library.custom_op("titan_exp::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send the r-th of `parts` [degree, ...] to rank r; the r-th of the result came from there."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts.contiguous(), group=group_named(group))
    return received


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts)


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    _, ctx.group = inputs


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return all_to_all(gradient.contiguous(), ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_save)
