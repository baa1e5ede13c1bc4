"""Memory tracker: allocation and release of every storage, by category, in order.

A storage's category may change later (a sum becomes a gradient), so we read it when the trace is evaluated. With
offloaded parameters, we track the device's memory and the host's side by side.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.plan.caching_allocator import Events
from titan_exp.plan.trace.torch_patches import PINNED, power_of_two

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered parameters",
    "communication",
    "loss",
    "workspaces",
    "other",
)
"""Categories of storages. `loss` is memory of the head and the loss, logits included; `communication` is buffers of
collectives; `optimizer` is its state and an update's temporaries; `workspaces` are kept by kernel libraries."""
MOMENTS = 400  # default maximum number of moments in a timeline
SETTLED = ("parameters", "optimizer")  # categories that `set_category` never changes
HOST = -1  # stream number of allocations in host memory


@dataclass(eq=False)
class Storage:
    """Tracked storage."""

    category: str
    number: int = 0  # number of its last allocation, by which allocator events name it
    size: int = 0  # bytes, rounded up as by the allocator
    on_host: bool = False  # True if it is in host memory, beside a device's memory
    is_final: bool = False


class Change(NamedTuple):
    """Allocation or release of a storage."""

    storage: Storage | None
    number: int  # number of the allocation; negative for a mark
    size: int  # bytes allocated; negative if released
    stream: int  # stream of an allocation; `HOST` for one in host memory
    where: str


@dataclass(frozen=True)
class Moment:
    """Allocated memory at one point of a step."""

    bytes: int
    by_category: dict[str, int]
    where: str  # phase of the step, e.g. `backward, block 3`.


@dataclass
class MemoryTracker:
    """Live storages and every change of their sizes, in order."""

    granularity: int = 1
    """Bytes to which sizes are rounded up: 512 for torch's allocator on CUDA, 1 for exact sizes. Pinned host memory is
    rounded up to powers of two (torch 2.11 to 2.15: allocate in ATen/core/CachingHostAllocator.h)."""
    device: torch.device | None = None
    """Device of tensors in device memory, if other tensors are in host memory; None if there is a single memory."""
    category: str = "other"
    where: str = "before the first step"
    outside_passes: str = ""
    """Class of elementwise kernels outside the model's forward and backward passes; empty inside them."""
    gradients: int = 0
    stream: Callable[[], int] = int  # returns the number of the current stream; by default 0
    _alive: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = field(default_factory=dict)
    _changes: list[Change] = field(default_factory=list)
    _begun: int = 0
    _where_before: str = ""
    _allocations: int = 0
    _named: dict[int, Storage] = field(default_factory=dict)

    def is_on_host(self, tensor: Tensor) -> bool:
        """True if a tensor, or its local shard, is in host memory beside a device's memory."""
        return self.device is not None and local(tensor).device != self.device

    def track(self, tensor: Tensor, category: str | None = None) -> None:
        """Add a tensor's storage, unless it is tracked already, as `category` or the current one."""
        self._add(tensor.untyped_storage(), category, on_host=self.is_on_host(tensor))

    def is_tracked(self, tensor: Tensor) -> bool:
        """True if a tensor's storage is tracked."""
        return tensor.untyped_storage()._cdata in self._alive

    def set_category(self, tensors: Iterable[Tensor | None], category: str, *, is_final: bool = False) -> None:
        """Set the category of storages retroactively; `SETTLED` and final categories are kept."""
        for tensor in tensors:
            if tensor is None:
                continue
            part = local(tensor)
            self.track(part, category)
            storage, _ = self._alive[part.untyped_storage()._cdata]
            if storage.category not in SETTLED and not storage.is_final:
                storage.category, storage.is_final = category, is_final

    def tracked_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of tracked tensors, each counted once."""
        entries = {self._alive[local(tensor).untyped_storage()._cdata][0] for tensor in tensors}
        return sum(entry.size for entry in entries)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Record the new size of a storage."""
        if storage._cdata not in self._alive:
            self._add(storage, None, on_host=False)
            return
        entry, _ = self._alive[storage._cdata]
        self._resize(entry, self._rounded(storage.nbytes(), entry, None))

    def allocate(self, size: int, category: str, *, on_host: bool = False) -> int:
        """Record memory that no tensor owns; returns its number, for `free`."""
        storage = Storage(category, on_host=on_host)
        self._resize(storage, self._rounded(size, storage, None))
        self._named[storage.number] = storage
        return storage.number

    def allocated_bytes(self, number: int) -> int:
        """Bytes that `allocate` recorded under a number; 0 once they are freed."""
        return self._named[number].size if number in self._named else 0

    def free(self, number: int) -> None:
        """Record the release of memory recorded by `allocate`."""
        self._resize(self._named.pop(number), 0)

    def begin_phase(self, category: str, where: str, outside_passes: str) -> None:
        """Begin a phase of the step."""
        self.category, self.where, self.outside_passes = category, where, outside_passes

    def mark_block_output(self, output: Any) -> None:
        """Record the hidden states returned by a block."""

    def mark_matmul(self, *, backward: bool) -> None:
        """Record a call of the matmul library, in the forward or in the backward pass's thread."""

    def begin_step(self) -> None:
        """Begin the evaluated step."""
        self._begun, self._where_before = len(self._changes), self.where

    def events(self) -> tuple[Events, Events]:
        """Allocations and releases in device memory, in order: before the step, and in it."""
        changes = self._on_device(0, self._begun), self._on_device(self._begun)
        before, during = (((each.number, max(each.size, 0), each.stream) for each in part) for part in changes)
        return Events(before), Events(during)

    def peak(self, *, on_host: bool = False) -> Moment:
        """First moment of the step with peak allocated memory, on the device or on the host."""
        at, where = self._begun, self._where_before
        total = highest = sum(self._held(at, on_host=on_host).values())
        for number, change in enumerate(self._changes[at:], at + 1):
            if change.storage is not None and change.storage.on_host is on_host:
                total += change.size
                if total > highest:
                    highest, at, where = total, number, change.where
        return Moment(highest, self._held(at, on_host=on_host), where)

    def allocated(self) -> dict[str, int]:
        """Bytes allocated on the device now, by category."""
        return self._held(len(self._changes))

    def tensors_on_host(self) -> dict[str, int]:
        """Bytes of live tensors on the host, by category, without rounding."""
        found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for entry, reference in self._alive.values():
            storage = reference()
            found[entry.category] += storage.nbytes() if entry.on_host and storage is not None else 0
        return found

    def timeline(self, limit: int = MOMENTS) -> list[Moment]:
        """Memory timeline of the step in at most `limit` moments: maxima of equal spans of changes, from the moment
        before the step on, with the peak."""
        changes, current = [*self._on_device(self._begun)], self._held(self._begun)
        total = largest = sum(current.values())
        moments = [Moment(total, dict(current), self._where_before)]
        for number, (storage, _, size, _, where) in enumerate(changes):
            assert storage is not None, "only storages are on the device"
            current[storage.category] += size
            total += size
            span = 1 + number * (limit - 1) // len(changes)
            if span >= len(moments) or total > largest:
                del moments[span:]
                largest = total
                moments.append(Moment(total, dict(current), where))
        return moments

    def _on_device(self, begin: int, end: int | None = None) -> Iterator[Change]:
        return (
            change for change in self._changes[begin:end] if change.storage is not None and not change.storage.on_host
        )

    def _held(self, end: int, *, on_host: bool = False) -> dict[str, int]:
        """Bytes by category after the first `end` changes."""
        held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for storage, _, size, _, _ in self._changes[:end]:
            if storage is not None and storage.on_host is on_host:
                held[storage.category] += size
        return held

    def _add(self, storage: torch.UntypedStorage, category: str | None, *, on_host: bool) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        entry = Storage(category or self.category, on_host=on_host)
        self._alive[key] = (entry, weakref.ref(storage, partial(self._release, key, entry)))
        self._resize(entry, self._rounded(storage.nbytes(), entry, category))

    def _release(self, key: int, entry: Storage, _: object) -> None:
        # Another storage may have reused its address.
        if key in self._alive and self._alive[key][0] is entry:
            del self._alive[key]
        self._resize(entry, 0)

    def _resize(self, storage: Storage, size: int) -> None:
        if size == storage.size:
            return
        if storage.size:
            self._changes.append(Change(storage, storage.number, -storage.size, 0, self.where))
        storage.size = size
        if size:
            self._allocations += 1
            storage.number = self._allocations
            stream = HOST if storage.on_host else self.stream()
            self._changes.append(Change(storage, storage.number, size, stream, self.where))

    def _rounded(self, size: int, storage: Storage, category: str | None) -> int:
        if storage.on_host:
            return power_of_two(size) if category in PINNED and size else size
        return -(-size // self.granularity) * self.granularity


def local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor; other tensors unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
