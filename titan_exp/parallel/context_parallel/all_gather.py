"""All ranks' keys and values gathered at once, and their gradients reduced to where they belong."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.parallel.process_groups import all_gather, reduce_scatter


class AllGatherKV:
    """One all-gather of every rank's keys and values, behind the attention to the own ones; one reduce-scatter back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradients: Tensor | None = None

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's block with the rank's number, the own one first."""
        gathered = own.new_empty((self.degree * own.shape[0], *own.shape[1:]))
        work = all_gather(gathered, own, group=self.group, async_op=True)
        yield self.rank, own
        assert work is not None, "every rank of the group takes part"
        work.wait()
        for step in range(1, self.degree):
            rank = (self.rank - step) % self.degree
            yield rank, gathered.unflatten(0, (self.degree, -1))[rank]

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Set this rank's part in the gradient of the block that `blocks` has just yielded."""
        if self._gradients is None:
            self._gradients = gradient.new_empty((self.degree, *gradient.shape))
        self._gradients[rank] = gradient

    def reduced_grad(self) -> Tensor:
        """The sum over all ranks of the gradient of the own block, once all are given."""
        assert self._gradients is not None, "blocks were not gone through"
        own = torch.empty_like(self._gradients[0])
        reduce_scatter(own, self._gradients.flatten(0, 1), group=self.group)
        return own
