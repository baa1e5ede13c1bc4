"""Ulysses attention: all-to-all between contiguous sequence parts and heads (Jacobs et al. 2023).

Inside attention a rank has the whole sequence of some heads, so kernels and masks work as on one device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.parallel.process_groups import gather_documents, group_named


class UlyssesAttention(nn.Module):
    """Replaces `CausalAttention`, with the same arguments, each this rank's part of the sequence.

    `core` attends over the joint sequence of the ranks in `group`, whose number must divide query heads and key-value
    heads.
    """

    def __init__(self, core: CausalAttention | ContextAttention, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.core = core
        self.degree, self.group = group.size(), group.group_name

    def mask(self, documents: Tensor | None) -> Any:
        """Argument `mask` of `forward`: the core's mask for the joint sequence; None for causal attention."""
        if documents is None:
            return None
        return self.core.mask(gather_documents(documents, self.group).movedim(0, 1).flatten(1, 2))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Tensor:
        """Attend from this rank's queries [batch, heads, part, head_dim] to all earlier positions."""
        # Query, key and value as [batch, degree, heads of a rank, part, head_dim] in one message.
        by_rank = [heads.unflatten(1, (self.degree, -1)) for heads in (query, key, value)]
        sizes = [heads.shape[2] for heads in by_rank]
        received = all_to_all(torch.cat(by_rank, dim=2).movedim(1, 0).contiguous(), self.group)
        whole = received.movedim(0, 2).flatten(2, 3).split(sizes, dim=1)
        out = self.core(*whole, mask).unflatten(2, (self.degree, -1))
        return all_to_all(out.movedim(2, 0).contiguous(), self.group).movedim(0, 1).flatten(1, 2)


# A custom op is opaque to the compiler, which would otherwise break the graph at the message.
@torch.library.custom_op("titan_exp::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send `parts[r]` of [degree, ...] to rank r and receive its part for this rank at index r."""
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
