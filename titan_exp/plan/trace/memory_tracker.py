"""What memory holds, byte by byte: every storage from its birth to its death, and what it was for.

What a storage is for may turn out later (a sum that becomes a gradient), so a storage's category is asked only when
the story is told.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.plan.cuda.caching_allocator import Event

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
"""What a storage may be for. `loss` is what the head and the loss keep, logits among it; `communication` are buffers
of messages; `optimizer` is its state, and what an update needs for a moment; `workspaces` are what libraries of kernels
take once and keep."""
MOMENTS = 400
"""Into how many moments a step's memory is told, at most, unless somebody asks for more."""
SETTLED = ("parameters", "optimizer")
"""What never becomes anything else."""


@dataclass(eq=False)
class Storage:
    """A piece of memory."""

    category: str
    """What it is for; one of `CATEGORIES`."""
    number: int = 0
    """Which of all; its name in the story that an allocator is told."""
    size: int = 0
    """Bytes, as an allocator hands them out."""


@dataclass(frozen=True)
class Moment:
    """Memory at one point of a step."""

    bytes: int
    """All of it."""
    by_category: dict[str, int]
    """The same, by what it is for."""
    where: str
    """What was being computed, in words."""


@dataclass
class MemoryTracker:
    """All storages that were seen, and every change of their sizes in order.

    Args:
        granularity: bytes to which an allocator rounds up: 512 for torch's on CUDA, 1 for exact sizes.
    """

    granularity: int = 1
    current: int = 0
    """Bytes that are alive."""
    category: str = "other"
    """What is being made, unless something else is said of it."""
    where: str = "before the first step"
    """What is being computed, in words; set by who knows, after `category`."""
    stream: Callable[[], int] = int
    """Tells on which stream memory is taken now; there is one, number 0, unless somebody knows better."""
    events: list[Event] = field(default_factory=list)
    """Births and deaths of all storages, from the first on."""
    begun: int = 0
    """How many of them were before `begin`."""
    _alive: dict[int, tuple[Storage, weakref.ref[torch.UntypedStorage]]] = field(default_factory=dict)
    _changes: list[tuple[Storage | None, int, str]] = field(default_factory=list)
    _standing: int = 0
    _made: int = 0
    _held: list[Storage] = field(default_factory=list)

    @classmethod
    def retold(
        cls, changes: Sequence[tuple[Storage, int, str]], standing: int, alive: Sequence[Storage]
    ) -> "MemoryTracker":
        """A ledger of a story that is known already.

        Args:
            changes: of a step: storages, how much they grow, and where.
            standing: how many of these, at the beginning, are what was there before.
            alive: what is there at the end.
        """
        ledger = cls()
        ledger._changes, ledger._standing, ledger._held = list(changes), standing, list(alive)
        return ledger

    alone: ClassVar[bool] = True
    """Whether there is no other memory than this ledger's."""

    def elsewhere(self, tensor: Tensor) -> bool:  # here there is one memory
        """Whether a tensor lies in another memory than this ledger is of."""
        return False

    def copied(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[str, str, int] | None:
        """Of a call that copies between memories: axis, which way, and bytes; None of all others."""
        return None

    def see(self, tensor: Tensor, category: str | None = None) -> None:
        """Enter a tensor's storage unless it is there, as made for `category`, else for what is being made."""
        self._enter(tensor.untyped_storage(), category)

    def know(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is entered."""
        return tensor.untyped_storage()._cdata in self._alive

    def is_for(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Say what storages are for, from their birth on; what is settled stays so."""
        for tensor in tensors:
            if tensor is None:
                continue
            part = local(tensor)
            self.see(part, category)
            storage, _ = self._alive[part.untyped_storage()._cdata]
            if storage.category not in SETTLED:
                storage.category = category

    def sizes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of tensors that are entered, each counted once."""
        entries = {self._alive[local(tensor).untyped_storage()._cdata][0] for tensor in tensors}
        return sum(entry.size for entry in entries)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage has another size now."""
        if storage._cdata not in self._alive:
            self._enter(storage, None)
            return
        entry, _ = self._alive[storage._cdata]
        self._change(entry, self._rounded(storage.nbytes()) - entry.size)

    def pressure(self, size: int, category: str) -> None:
        """Note memory that an operator takes and gives back before it returns."""
        passing = self._storage(category)
        self._change(passing, self._rounded(size))
        self._change(passing, -self._rounded(size))

    def hold(self, size: int, category: str) -> None:
        """Note memory that is taken and never given back."""
        self._held.append(self._storage(category))
        self._change(self._held[-1], self._rounded(size))

    def hidden(self, output: Any) -> None:
        """A block has made these hidden states."""

    def matmul(self, *, backward: bool) -> None:
        """The library of matmuls is called, in the forward or in the backward pass's thread."""

    def begin(self) -> None:
        """Forget what was, but for `events`; what is alive now is where the story begins."""
        self._changes = [(storage, storage.size, self.where) for storage in self._present()]
        self._standing = len(self._changes)
        self.begun = len(self.events)

    def peak(self) -> Moment:
        """The moment since `begin` at which most was alive; the first of equal ones."""
        total, most, at = 0, -1, 0
        # Where the story begins, nothing is a peak before all is there.
        for number, (_, delta, _) in enumerate(self._changes):
            total += delta
            if total > most:
                most, at = total, number
        by_category: dict[str, int] = defaultdict(int)
        for storage, delta, _ in self._changes[: at + 1]:
            if storage is not None:
                by_category[storage.category] += delta
        where = self._changes[at][2] if self._changes else self.where
        return Moment(max(most, 0), {name: by_category[name] for name in CATEGORIES}, where)

    def held(self) -> dict[str, int]:
        """Bytes alive now, by what they are for."""
        held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for storage in self._present():
            held[storage.category] += storage.size
        return held

    def timeline(self, most: int = MOMENTS) -> list[Moment]:
        """The story since `begin` in at most so many moments: of as many equal spans of changes, the largest of each.

        The first moment is where the story begins; the peak is among them.
        """
        told, moments, largest = max(len(self._changes) - self._standing, 1), list[Moment](), -1
        current: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for number, (storage, delta, where) in enumerate(self._changes, 1 - self._standing):
            if storage is not None:
                current[storage.category] += delta
            if number < 0:
                continue
            span = 1 + (number - 1) * (most - 1) // told if number else 0
            total = sum(current.values())
            if span >= len(moments) or total > largest:
                del moments[span:]
                largest = total
                moments.append(Moment(total, dict(current), where))
        return moments

    def _present(self) -> list[Storage]:
        return [*(storage for storage, _ in self._alive.values()), *self._held]

    def _storage(self, category: str) -> Storage:
        self._made += 1
        return Storage(category, self._made)

    def _enter(self, storage: torch.UntypedStorage, category: str | None) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        entry = self._storage(category or self.category)
        self._alive[key] = (entry, weakref.ref(storage, partial(self._gone, key, entry)))
        self._change(entry, self._rounded(storage.nbytes()))

    def _gone(self, key: int, entry: Storage, _: object) -> None:
        # Its address may be another storage's by now.
        if key in self._alive and self._alive[key][0] is entry:
            del self._alive[key]
        self._change(entry, -entry.size)

    def _change(self, storage: Storage, delta: int) -> None:
        if delta:
            if storage.size:
                self.events.append(Event(storage.number, 0, 0))
            storage.size += delta
            if storage.size:
                self.events.append(Event(storage.number, storage.size, self.stream()))
            self.current += delta
            self._changes.append((storage, delta, self.where))

    def _rounded(self, size: int) -> int:
        return -(-size // self.granularity) * self.granularity


def local(tensor: Tensor) -> Tensor:
    """A rank's own part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
