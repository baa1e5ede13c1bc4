"""Keys and values passed around a ring of ranks, each transfer behind the attention to the keys before (Liu et al.
2023)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class RingKV:
    """One round of a rank's keys and values through the group, and of their gradients behind them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradient: _Transfer | None = None

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's block with the rank's number, the own one first, each as large as a second that is on its way.

        All ranks iterate to the end together.
        """
        block = own
        for step in range(self.degree):
            following = _Transfer(block, self.group) if step < self.degree - 1 else None
            yield (self.rank - step) % self.degree, block
            if following is not None:
                block = following.wait()

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Add to the gradient of the block that `blocks` has just yielded; it travels on with the block."""
        if self._gradient is not None:
            gradient = gradient + self._gradient.wait()
        self._gradient = _Transfer(gradient, self.group)

    def reduced_grad(self) -> Tensor:
        """The sum over all ranks of the gradient of the own block, once the round is done."""
        assert self._gradient is not None, "blocks were not gone through"
        return self._gradient.wait()


class _Transfer:
    """A tensor on its way to the next rank of the group, while the one of the rank before is on its way here."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        # Kept until the transfer is over: nothing else keeps the buffer alive.
        self._sent, self._received = tensor, torch.empty_like(tensor)
        after, before = ((rank + step) % degree for step in (1, -1))
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=after),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=before),
            ]
        )

    def wait(self) -> Tensor:
        """Buffer received from the previous rank."""
        for work in self._work:
            work.wait()
        return self._received
