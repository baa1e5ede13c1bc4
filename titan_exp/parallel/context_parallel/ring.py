"""Ring exchange of keys and values; each transfer overlaps attention to the current block (Liu et al. 2023)."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor


class RingKV:
    """Rotates the keys and values of all ranks once around the group; their gradients follow one step behind."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.degree = group, group.rank(), group.size()
        self._gradient: _Transfer | None = None

    def blocks(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (source rank, block), the local block first. Every rank must exhaust the iterator."""
        block = local
        for step in range(self.degree):
            transfer = _Transfer(block, self.group) if step < self.degree - 1 else None
            yield (self.rank - step) % self.degree, block
            if transfer is not None:
                block = transfer.wait()

    def accumulate_grad(self, rank: int, gradient: Tensor) -> None:
        """Add to the gradient of the block that `blocks` yielded last, and send it to the next rank."""
        if self._gradient is not None:
            gradient = gradient + self._gradient.wait()
        self._gradient = _Transfer(gradient, self.group)

    def reduced_grad(self) -> Tensor:
        """Gradient of the local block, summed over ranks; called after the last block."""
        assert self._gradient is not None, "no block was processed"
        return self._gradient.wait()


class _Transfer:
    """Send to the next rank of the group and receive from the previous one."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        # Keeps the sent buffer alive until the transfer has finished.
        self._sent, self._received = tensor, torch.empty_like(tensor)
        next_rank, previous_rank = ((rank + step) % degree for step in (1, -1))
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=next_rank),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=previous_rank),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the transfer; returns the buffer received from the previous rank."""
        for work in self._work:
            work.wait()
        return self._received
