"""A step cut into pieces: of each what it leaves behind, the most that it held on the way, and its work.

From the pieces of a small run those of a large one are put together (`plan/shortcut.py`), so a piece says nothing of
what was alive before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage

from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker, Storage, local

STEP = "the step"
"""What a step's first piece is called."""
CategoryBytes = NDArray[np.int64]
"""Bytes by what they are for, in the order of `CATEGORIES`."""


def category_bytes(by_category: Mapping[str, int]) -> CategoryBytes:
    """Bytes by category as a vector."""
    return np.array([by_category.get(name, 0) for name in CATEGORIES], dtype=np.int64)


@dataclass(frozen=True)
class Segment:
    """A part of a step."""

    label: str
    """What is being computed, in words, or what somebody called it."""
    net: CategoryBytes
    """What it leaves behind, less what it frees."""
    peak: CategoryBytes
    """What it had added at the moment when that was the most, the first of equal ones; zeros where it only frees."""
    where: str
    """What was being computed at that moment, in words."""
    costs: OpCosts
    """Operations, bytes and messages."""


class AllocationEvent(NamedTuple):
    """What happens in a scene: a storage is born, or dies, or a matmul is computed for the first time in it."""

    birth: int
    """Number of the storage's birth among all of a tape; of matmuls -1 forward, -2 backward."""
    size: int = 0
    """Bytes of it; 0 where it dies."""
    stream: int = 0
    """On which stream; of no meaning where it dies."""
    category: str = ""
    """What it turned out to be for, empty where that is what was being made; likewise."""
    output: bool = False
    """Whether it is what a block hands to the next one; likewise."""


FORWARD_MATMUL, BACKWARD_MATMUL = -1, -2
"""Births of nothing: where a thread calls the library of matmuls, which takes a workspace the first time."""
NOTHING = -3
"""The birth of what is not there."""


@dataclass(frozen=True)
class EventSegment:
    """A piece of a story as an allocator is told it, from the build on."""

    label: str
    """As of a piece."""
    where: str | None
    """What is being computed, in words, from its beginning on; None where that goes on as before."""
    category: str
    """What is being made, where `where` says what is computed."""
    told: list[AllocationEvent]
    """What happens."""
    step: int
    """-1 of the build, 0 of the first step, 1 of the second."""


class SegmentTracker(MemoryTracker):
    """A ledger that remembers where it was told that something else is being computed."""

    _watch: CostMode | None = None

    def __init__(self) -> None:
        self._cuts: list[tuple[int, str, OpCosts]] = []
        self._marks: list[tuple[int, str, str | None, str, int]] = []
        self._told: list[tuple[Storage | None, AllocationEvent]] = []
        self.reduced: list[dict[str, int]] = []
        """Of each step: births of reduced gradients, by the names of their parameters; entered by who knows."""
        self.made: list[int] = []
        """Births of hidden states that passes of stages make, in order; likewise."""
        self.outputs: set[int] = set()
        """Births of hidden states that blocks make."""
        self._as_made: set[int] = set()
        self._births, self._last_birth, self._step = 0, dict[int, int](), -1
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "where":
            self.cut(str(value), is_where=True)

    def follow(self, watch: CostMode) -> None:
        """Take note of the work that is watched."""
        self._watch = watch

    def begin(self) -> None:
        """Forget what was; here the first piece begins."""
        super().begin()
        self._cuts = [(len(self._changes), self.where, OpCosts())]
        self.next_step()

    def next_step(self) -> None:
        """A step begins here."""
        self._step += 1
        self.cut(STEP)

    def cut(self, label: str, *, is_where: bool = False) -> None:
        """A piece ends here, and one of this name begins."""
        self._marks.append((len(self._told), label, label if is_where else None, self.category, self._step))
        if self._watch is not None and self._cuts:
            self._cuts.append((len(self._changes), label, sum_costs([self._watch.costs])))

    def matmul(self, *, backward: bool) -> None:
        """The library of matmuls is called."""
        mark = BACKWARD_MATMUL if backward else FORWARD_MATMUL
        start = self._marks[-1][0]
        if all(told.birth != mark for _, told in self._told[start:]):
            self._told.append((None, AllocationEvent(mark)))

    def hidden(self, output: Any) -> None:
        """A block has made these hidden states."""
        if isinstance(output, Tensor):
            self.outputs.add(self.birth(output))

    def birth(self, tensor: Tensor) -> int:
        """Number of the birth of a tensor's storage; `NOTHING` where it is not entered."""
        part = local(tensor)
        if not self.know(part):
            return NOTHING
        storage, _ = self._alive[part.untyped_storage()._cdata]
        return self._last_birth[storage.number]

    def scenes(self) -> list[EventSegment]:
        """All that happened so far."""
        found = []
        ends = [*(mark[0] for mark in self._marks[1:]), len(self._told)]
        for (start, label, where, category, step), end in zip(self._marks, ends, strict=True):
            told = [self._turned_out(storage, it) for storage, it in self._told[start:end]]
            found.append(EventSegment(label, where, category, told, step))
        return found

    def _turned_out(self, storage: Storage | None, it: AllocationEvent) -> AllocationEvent:
        if storage is None or not it.size:
            return it
        as_made = it.category == storage.category and it.birth in self._as_made
        category = "" if as_made else storage.category
        return it._replace(category=category, output=it.birth in self.outputs)

    def _enter(self, storage: UntypedStorage, category: str | None) -> None:
        known = self._births
        super()._enter(storage, category)
        if category is None and self._births > known:
            self._as_made.add(self._births)

    def base(self) -> CategoryBytes:
        """What was held where the story begins, by what it turned out to be for."""
        return _sum_of(self._changes[: self._cuts[0][0]])

    def amount(self, tensor: Tensor) -> CategoryBytes:
        """What a tensor's storage holds; nothing where it is not entered."""
        if not self.know(tensor):
            return category_bytes({})
        storage, _ = self._alive[tensor.untyped_storage()._cdata]
        return category_bytes({storage.category: storage.size})

    def _change(self, storage: Storage, delta: int) -> None:
        known = len(self.events)
        super()._change(storage, delta)
        for event in self.events[known:]:
            if event.size:
                self._births += 1
                self._last_birth[event.storage] = self._births
            self._told.append(
                (storage, AllocationEvent(self._last_birth[event.storage], event.size, event.stream, storage.category))
            )

    def pieces(self) -> list[Segment]:
        """All pieces since `begin` that have ended."""
        return [
            _piece(label, self._changes[start:end], work, after)
            for (start, label, work), (end, _, after) in pairwise(self._cuts)
        ]


def sum_costs(works: Iterable[OpCosts], times: int = 1) -> OpCosts:
    """The sum of works, so many times."""
    total = OpCosts()
    for work in works:
        total.flops += times * work.flops
        total.fp8_flops += times * work.fp8_flops
        total.bytes_moved += times * work.bytes_moved
        total.operators += times * work.operators
        for key, calls in work.calls.items():
            # One more layer may make a message larger, and no further one.
            if calls or work.messages[key]:
                total.messages[key] += times * work.messages[key]
                total.calls[key] += times * calls
    return total


def join_segments(label: str, pieces: Sequence[Segment]) -> Segment:
    """Pieces that follow each other, as one."""
    net, most, height = category_bytes({}), category_bytes({}), 0
    where = pieces[0].where if pieces else label
    for piece in pieces:
        if net.sum() + piece.peak.sum() > height:
            most, where = net + piece.peak, piece.where
            height = int(most.sum())
        net = net + piece.net
    return Segment(label, net, most, where, sum_costs([piece.costs for piece in pieces]))


def _piece(label: str, changes: Sequence[tuple[object, int, str]], before: OpCosts, after: OpCosts) -> Segment:
    total, height, at = 0, 0, -1
    for number, (_, delta, _) in enumerate(changes):
        total += delta
        if total > height:
            height, at = total, number
    where = changes[at][2] if at >= 0 else label
    # Nothing that a piece does not send is among its messages.
    work = sum_costs([sum_costs([after, sum_costs([before], -1)])])
    return Segment(label, _sum_of(changes), _sum_of(changes[: at + 1]), where, work)


def _sum_of(changes: Sequence[tuple[object, int, str]]) -> CategoryBytes:
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for storage, delta, _ in changes:
        found[storage.category] += delta  # type: ignore[attr-defined]  # a Storage
    return category_bytes(found)
