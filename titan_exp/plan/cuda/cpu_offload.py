"""CPU offload: GPU memory, host memory and copies between them.

FSDP2's own `CPUOffloadPolicy` code decides by the device of fake tensors what it copies. The fake GPU is named as a
second CPU, because torch without CUDA cannot run backward on CUDA tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fully_shard

from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker, Moment, local
from titan_exp.plan.trace.torch_patches import replaced_attributes

GPU = torch.device("cpu", 1)
"""Device of the fake GPU."""
AXIS = "host"
"""Axis name of copies between host and GPU."""
TO_GPU, WAITED_FOR, TO_HOST = "to the GPU", "to the GPU, waited for", "to the host"
"""Kinds of copies. FSDP2 copies parameters and gradients on its own streams; on a single rank, which gathers nothing,
parameters are copied on the compute stream (`WAITED_FOR`)."""
PINNED = ("parameters", "gradients")
"""Categories in pinned host memory: the trainer uses `CPUOffloadPolicy(pin_memory=True)` on CUDA. FSDP2 pins parameters
before the first step (`FSDPParam.reset_sharded_param`); torch pins the target of non-blocking copies of gradients
(`foreach_reduce`, ATen's `_to_copy`). Optimizer state is created like its parameter, but not pinned."""


@dataclass(frozen=True)
class HostUsage:
    """Host memory and costs of a rank."""

    peak: Moment
    """Peak host memory, pinned blocks rounded up."""
    persistent: dict[str, int]
    """Bytes of tensors on the host between steps, by category."""
    costs: OpCosts
    """Costs of operators that run on the host: gradient clipping and the optimizer."""


class HostTracker(MemoryTracker):
    """Tracks host memory, where pinned blocks are rounded up to a power of two and never freed.

    See CachingHostAllocatorImpl::allocate in ATen/core/CachingHostAllocator.h, torch 2.11 to 2.15.
    """

    def tensors(self) -> dict[str, int]:
        """Bytes of live tensors, by category, without rounding."""
        held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for entry, storage in self._alive.values():
            found = storage()
            held[entry.category] += 0 if found is None else found.nbytes()
        return held

    def _add(self, storage: torch.UntypedStorage, category: str | None) -> None:
        size = storage.nbytes()
        self.granularity = power_of_two(size) if category in PINNED and size else 1
        super()._add(storage, category)
        self.granularity = 1


@dataclass
class HostAndGpuTracker(MemoryTracker):
    """Tracks GPU memory, and host memory in a separate tracker."""

    alone = False

    host: HostTracker = field(default_factory=HostTracker)
    """Tracks host memory."""

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """True if a tensor is on the host."""
        return on_host(tensor)

    def copy_between(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[str, str, int] | None:
        """Axis, direction and bytes of a copy between host and GPU, else None."""
        if not inputs or len(outputs) != 1 or on_host(inputs[-1]) == on_host(outputs[0]):
            return None
        size = outputs[0].numel() * outputs[0].element_size()
        if on_host(outputs[0]):
            return AXIS, TO_HOST, size
        return AXIS, TO_GPU if self.stream() else WAITED_FOR, size

    def track(self, tensor: Tensor, category: str | None = None) -> None:
        """Add a tensor's storage to the tracker of its memory."""
        if on_host(tensor):
            self._host().track(tensor, category)
        else:
            super().track(tensor, category)

    def is_tracked(self, tensor: Tensor) -> bool:
        """True if a tensor's storage is tracked."""
        return self.host.is_tracked(tensor) if on_host(tensor) else super().is_tracked(tensor)

    def set_category(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Set the category of storages in either memory."""
        there = [tensor for tensor in tensors if tensor is not None]
        self._host().set_category([tensor for tensor in there if on_host(tensor)], category)
        super().set_category([tensor for tensor in there if not on_host(tensor)], category)

    def tracked_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of tracked tensors in both memories."""
        tracked = list(tensors)
        host = self.host.tracked_bytes([tensor for tensor in tracked if on_host(tensor)])
        return host + super().tracked_bytes([tensor for tensor in tracked if not on_host(tensor)])

    def begin_step(self) -> None:
        """Begin the evaluated step in both trackers."""
        super().begin_step()
        self.host.begin_step()

    def _host(self) -> MemoryTracker:
        self.host.category, self.host.where = self.category, self.where
        return self.host


def on_host(tensor: Tensor) -> bool:
    """True if a tensor, or its local shard, is not on the fake GPU."""
    return local(tensor).device != GPU


@contextmanager
def gpu_beside_host() -> Iterator[None]:
    """Let FSDP2 use the fake GPU as its device in the `with` block, so that its copies are traced."""

    def device_of(plain: Callable[[Any], torch.device], mesh: Any) -> torch.device:
        return GPU if mesh.device_type == GPU.type else plain(mesh)

    replacement = partial(device_of, _fully_shard._get_device_from_mesh)
    with replaced_attributes((_fully_shard, "_get_device_from_mesh", replacement)):
        yield


def power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()
