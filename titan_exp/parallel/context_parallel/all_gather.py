"""All-gather of keys and values over context-parallel ranks, and reduce-scatter of their gradients."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.parallel.process_groups import all_gather, reduce_scatter


class AllGatherKV:
    """Gathers all keys and values in one message, overlapped with attention to the own block."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradients: Tensor | None = None

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's block with its rank, the own block first."""
        gathered = own.new_empty((self.degree * own.shape[0], *own.shape[1:]))
        work = all_gather(gathered, own, group=self.group, async_op=True)
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
        """Sum over ranks of the gradient of the own block, after all blocks."""
        assert self._gradients is not None, "no block was processed"
        own = torch.empty_like(self._gradients[0])
        reduce_scatter(own, self._gradients.flatten(0, 1), group=self.group)
        return own
