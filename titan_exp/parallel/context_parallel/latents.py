"""All-gather of latents over context-parallel ranks, for latent attention.

Latents are far narrower than the keys and values of all heads (576 numbers a token against 40,960 in DeepSeek V3), so
that each rank gathers those of the whole sequence and expands them itself.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.parallel.functional_collectives import all_gather, reduce_scatter


class GatheredLatents(nn.Module):
    """Replaces `LatentGather`: latents of all ranks, and their gradient summed over ranks in fp32."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.degree = group.group_name, group.size()

    def forward(self, latents: Tensor) -> Tensor:
        """[batch, part, width] to [batch, degree · part, width], the ranks' parts in order."""
        return _GatherLatents.apply(latents, self.degree, self.group)  # type: ignore[return-value]  # a Tensor


class WholeKV:
    """Keys and values of the whole sequence on every rank, in the blocks of `ring` and `all_gather`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.degree = group.rank(), group.size()
        self._gradients: dict[int, Tensor] = {}

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
        """Gradient of all blocks, of this rank's queries alone: latents sum them."""
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
