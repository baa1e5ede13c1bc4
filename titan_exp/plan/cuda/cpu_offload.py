"""The GPU's memory beside the host's, where parameters are offloaded: what lies in which, and what is copied between.

Pretended tensors have a device of their own, by which torch's own code decides what it copies: FSDP2's pieces of it
for `CPUOffloadPolicy` run as they are. Only the GPU has another name, a second CPU, because torch without CUDA cannot
run backward on CUDA's.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fully_shard

from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker, Moment, local

GPU = torch.device("cpu", 1)
"""What the GPU is called where the host's memory is another."""
AXIS = "host"
"""What copies between the two are booked on."""
TO_GPU, WAITED_FOR, TO_HOST = "to the GPU", "to the GPU, waited for", "to the host"
"""Kinds of copies. FSDP2 copies parameters and gradients on streams of its own, but parameters of a lone rank, which
gathers nothing, on the one that computes."""
PINNED = ("parameters", "gradients")
"""What lies in pinned memory of the host: the trainer asks for `CPUOffloadPolicy(pin_memory=True)` on CUDA. FSDP2 pins
parameters before the first step (`FSDPParam.reset_sharded_param`); a gradient's copy is pinned by torch, whose copies
to the host are where they do not block (`foreach_reduce`, ATen's `_to_copy`). State of an optimizer is made like its
parameter, which tells nothing of pinning, and is not."""


@dataclass(frozen=True)
class HostUsage:
    """What a rank has and does on the host."""

    peak: Moment
    """When most of its memory is held there: blocks as they are handed out, pinned ones rounded up."""
    persistent: dict[str, int]
    """Bytes of tensors held there between steps, by what they are for."""
    costs: OpCosts
    """Of a step's operators, what runs there: clipping and the optimizer's update."""


class HostTracker(MemoryTracker):
    """The host's memory: pinned blocks are the next power of two.

    As CachingHostAllocatorImpl::allocate has it (ATen/core/CachingHostAllocator.h, torch 2.11 to 2.15): it rounds
    requests by PowerOf2Ceil, and never gives a block back.
    """

    def tensors(self) -> dict[str, int]:
        """Bytes alive now, by what they are for, as tensors count them."""
        held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for entry, storage in self._alive.values():
            its = storage()
            held[entry.category] += 0 if its is None else its.nbytes()
        return held

    def _enter(self, storage: torch.UntypedStorage, category: str | None) -> None:
        size = storage.nbytes()
        self.granularity = power_of_two(size) if category in PINNED and size else 1
        super()._enter(storage, category)
        self.granularity = 1


@dataclass
class HostAndGpuTracker(MemoryTracker):
    """The GPU's memory, and beside it the host's, in a ledger of its own."""

    alone = False

    host: HostTracker = field(default_factory=HostTracker)
    """What lies there."""

    def elsewhere(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the host's memory."""
        return on_host(tensor)

    def copied(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[str, str, int] | None:
        """Of a call that copies between the memories: axis, which way, and bytes; None of all others."""
        if not given or len(made) != 1 or on_host(given[-1]) == on_host(made[0]):
            return None
        size = made[0].numel() * made[0].element_size()
        if on_host(made[0]):
            return AXIS, TO_HOST, size
        return AXIS, TO_GPU if self.stream() else WAITED_FOR, size

    def see(self, tensor: Tensor, category: str | None = None) -> None:
        """Enter a tensor's storage where it lies."""
        if on_host(tensor):
            self._told().see(tensor, category)
        else:
            super().see(tensor, category)

    def know(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is entered."""
        return self.host.know(tensor) if on_host(tensor) else super().know(tensor)

    def is_for(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Say what storages are for, wherever they are."""
        there = [tensor for tensor in tensors if tensor is not None]
        self._told().is_for([tensor for tensor in there if on_host(tensor)], category)
        super().is_for([tensor for tensor in there if not on_host(tensor)], category)

    def sizes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of tensors that are entered, in both memories."""
        its = list(tensors)
        there = self.host.sizes([tensor for tensor in its if on_host(tensor)])
        return there + super().sizes([tensor for tensor in its if not on_host(tensor)])

    def begin(self) -> None:
        """Forget what was in either."""
        super().begin()
        self.host.begin()

    def _told(self) -> MemoryTracker:
        self.host.category, self.host.where = self.category, self.where
        return self.host


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor, or this rank's part of it, lies in the host's memory, where the GPU's is another."""
    return local(tensor).device != GPU


@contextmanager
def gpu_beside_host() -> Iterator[None]:
    """For the time of the block, let FSDP2 take the GPU's name for its device, and copies between the two be seen."""

    def device_of(plain: Callable[[Any], torch.device], mesh: Any) -> torch.device:
        return GPU if mesh.device_type == GPU.type else plain(mesh)

    with patch.object(_fully_shard, "_get_device_from_mesh", partial(device_of, _fully_shard._get_device_from_mesh)):
        yield


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()
