"""Ring exchange of keys and values, each transfer overlapped with attention to the previous block (Liu et al. 2023)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class RingKV:
    """One round of this rank's keys and values through the group, their gradients one step behind."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradient: _Transfer | None = None

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield every rank's block with its rank, the own block first; all ranks iterate to the end together."""
        block = own
        for step in range(self.degree):
            following = _Transfer(block, self.group) if step < self.degree - 1 else None
            yield (self.rank - step) % self.degree, block
            if following is not None:
                block = following.wait()

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Add to the gradient of the block that `blocks` yielded last, and send it on."""
        if self._gradient is not None:
            gradient = gradient + self._gradient.wait()
        self._gradient = _Transfer(gradient, self.group)

    def reduced_grad(self) -> Tensor:
        """Sum over ranks of the gradient of the own block, after the round."""
        assert self._gradient is not None, "no block was processed"
        return self._gradient.wait()


class _Transfer:
    """Send to the next rank of the group and receive from the previous one."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        # Keeps the sent buffer alive until the transfer has finished.
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
