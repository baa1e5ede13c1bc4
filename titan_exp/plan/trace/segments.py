"""Segments of a traced step: net allocation, peak, costs and allocation events of each.

A segment does not depend on what was allocated before it, so segments of a small model can be repeated in a large one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn

from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.parallel.step_observer import StepObserver
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker, Storage, local

STEP = "the step"
"""Label of the first segment of a step."""
MICRO_BATCH, OPTIMIZER_STEP = "micro-batch", "optimizer step"
ACTION, BETWEEN_ACTIONS = "action", "between actions"
REDUCE, GROUP, FINAL = "reduce", "group", "final"
"""Labels of segments: of a micro-batch without a pipeline; from reduced gradients to the next step; of a pipeline
action, and after it; of a stage's gradient reduction, of each FSDP parameter group in it, and of its end."""
CategoryBytes = NDArray[np.int64]
"""Bytes by category, in the order of `CATEGORIES`."""


def category_bytes(by_category: Mapping[str, int]) -> CategoryBytes:
    """Bytes by category as a vector."""
    return np.array([by_category.get(name, 0) for name in CATEGORIES], dtype=np.int64)


@dataclass(frozen=True)
class Segment:
    """A part of a step."""

    label: str
    """Phase of the step, or a label of an observer."""
    net: CategoryBytes
    """Bytes that it allocates and keeps, less those that it frees."""
    peak: CategoryBytes
    """Bytes added at its peak, the first of equal ones; zeros where it only frees."""
    where: str
    """Phase of the step at that moment."""
    costs: OpCosts
    """FLOPs, memory traffic and messages."""


class AllocationEvent(NamedTuple):
    """Allocation or release of a storage, or the first matmul of a segment."""

    allocation: int
    """Number of the storage's allocation; `FORWARD_MATMUL` or `BACKWARD_MATMUL` for matmuls."""
    size: int = 0
    """Bytes allocated; 0 for a release."""
    stream: int = 0
    """Stream of an allocation."""
    category: str = ""
    """Final category of an allocation; empty for that of the phase."""
    output: bool = False
    """True for the hidden states that a block returns."""


FORWARD_MATMUL, BACKWARD_MATMUL = -1, -2
"""First matmul of a segment in each thread; the matmul library allocates a workspace on its first call."""
NOT_TRACKED = -3
"""Allocation number of a tensor that is not tracked."""


@dataclass(frozen=True)
class EventSegment:
    """Allocation events of a segment."""

    label: str
    """The label of its `Segment`."""
    where: str | None
    """Phase of the step that begins with it; None where the phase does not change."""
    category: str
    """Default category of that phase."""
    events: list[AllocationEvent]
    """In order."""
    step: int
    """-1 for the build, 0 for the first step, 1 for the second."""


class SegmentTracker(MemoryTracker):
    """A memory tracker that also cuts a trace into segments."""

    _mode: CostMode | None = None

    def __init__(self) -> None:
        self._cuts: list[tuple[int, str, OpCosts]] = []
        self._marks: list[tuple[int, str, str | None, str, int]] = []
        self._recorded: list[tuple[Storage | None, AllocationEvent]] = []
        self.reduced_gradients: list[dict[str, int]] = []
        """Allocations of reduced gradients by parameter name, for each step; set by `SegmentObserver`."""
        self.action_results: list[int] = []
        """Allocations of the results of pipeline actions, in order; set by `SegmentObserver`."""
        self.block_outputs: set[int] = set()
        """Allocations of block outputs."""
        self._default_category: set[int] = set()
        self._allocations, self._last_allocation, self._step = 0, dict[int, int](), -1
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "where":
            self.cut(str(value), is_where=True)

    def read_costs_of(self, mode: CostMode) -> None:
        """Read the costs of segments from this mode."""
        self._mode = mode

    def begin_step(self) -> None:
        """Begin the step that is evaluated, with its first segment."""
        super().begin_step()
        self._cuts = [(len(self._changes), self.where, OpCosts())]
        self.next_step()

    def next_step(self) -> None:
        """Begin a step."""
        self._step += 1
        self.cut(STEP)

    def cut(self, label: str, *, is_where: bool = False) -> None:
        """End a segment and begin another."""
        self._marks.append((len(self._recorded), label, label if is_where else None, self.category, self._step))
        if self._mode is not None and self._cuts:
            self._cuts.append((len(self._changes), label, sum_costs([self._mode.costs])))

    def mark_matmul(self, *, backward: bool) -> None:
        """Record the first matmul of a segment in this thread."""
        mark = BACKWARD_MATMUL if backward else FORWARD_MATMUL
        start = self._marks[-1][0]
        if all(event.allocation != mark for _, event in self._recorded[start:]):
            self._recorded.append((None, AllocationEvent(mark)))

    def mark_block_output(self, output: Any) -> None:
        """Record the output of a block."""
        if isinstance(output, Tensor):
            self.block_outputs.add(self.allocation_of(output))

    def allocation_of(self, tensor: Tensor) -> int:
        """Number of the allocation of a tensor's storage, or `NOT_TRACKED`."""
        part = local(tensor)
        if not self.is_tracked(part):
            return NOT_TRACKED
        storage, _ = self._alive[part.untyped_storage()._cdata]
        return self._last_allocation[storage.number]

    def event_segments(self) -> list[EventSegment]:
        """Allocation events of all segments so far."""
        found = []
        ends = [*(mark[0] for mark in self._marks[1:]), len(self._recorded)]
        for (start, label, where, category, step), end in zip(self._marks, ends, strict=True):
            events = [self._with_category(storage, event) for storage, event in self._recorded[start:end]]
            found.append(EventSegment(label, where, category, events, step))
        return found

    def _with_category(self, storage: Storage | None, event: AllocationEvent) -> AllocationEvent:
        if storage is None or not event.size:
            return event
        is_default = event.category == storage.category and event.allocation in self._default_category
        category = "" if is_default else storage.category
        return event._replace(category=category, output=event.allocation in self.block_outputs)

    def _add(self, storage: UntypedStorage, category: str | None) -> None:
        known = self._allocations
        super()._add(storage, category)
        if category is None and self._allocations > known:
            self._default_category.add(self._allocations)

    def allocated_before(self) -> CategoryBytes:
        """Bytes allocated before the step."""
        return _sum_of(self._changes[: self._cuts[0][0]])

    def tracked_by_category(self, tensor: Tensor) -> CategoryBytes:
        """Bytes of a tensor's storage; zeros where it is not tracked."""
        if not self.is_tracked(tensor):
            return category_bytes({})
        storage, _ = self._alive[tensor.untyped_storage()._cdata]
        return category_bytes({storage.category: storage.size})

    def _change(self, storage: Storage, delta: int) -> None:
        known = len(self.events)
        super()._change(storage, delta)
        for event in self.events[known:]:
            if event.size:
                self._allocations += 1
                self._last_allocation[event.storage] = self._allocations
            self._recorded.append(
                (
                    storage,
                    AllocationEvent(self._last_allocation[event.storage], event.size, event.stream, storage.category),
                )
            )

    def segments(self) -> list[Segment]:
        """All segments of the step that have ended."""
        return [
            _segment(label, self._changes[start:end], costs, after)
            for (start, label, costs), (end, _, after) in pairwise(self._cuts)
        ]


class SegmentObserver(StepObserver):
    """Ends a segment where a micro-batch, a pipeline action, a gradient reduction or the optimizer step begins."""

    def __init__(self, tracker: SegmentTracker) -> None:
        self._tracker = tracker

    def microbatch_begin(self, index: int) -> None:
        """Begin a micro-batch."""
        self._tracker.cut(MICRO_BATCH)

    def action_begin(self, action: Action) -> None:
        """Begin a pipeline action."""
        self._tracker.cut(f"{ACTION} {action.stage}")

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Begin the time between two pipeline actions."""
        self._tracker.action_results.append(NOT_TRACKED if result is None else self._tracker.allocation_of(result))
        self._tracker.cut(BETWEEN_ACTIONS)

    def stage_reduction_begin(self, stage: int) -> None:
        """Begin the gradient reduction of a stage."""
        self._tracker.cut(f"{REDUCE} {stage}")

    def group_reduction_begin(self) -> None:
        """Begin the gradient reduction of an FSDP parameter group."""
        self._tracker.cut(GROUP)

    def stage_reduction_end(self) -> None:
        """Begin the wait for the reductions of a stage."""
        self._tracker.cut(FINAL)

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """Begin the optimizer step, and note the storages of gradients."""
        self._tracker.reduced_gradients.append(_gradient_allocations(self._tracker, parts))
        self._tracker.cut(OPTIMIZER_STEP)


def _gradient_allocations(tracker: SegmentTracker, parts: Sequence[nn.Module]) -> dict[str, int]:
    named = [pair for part in parts for pair in part.named_parameters()]
    return {name: tracker.allocation_of(weight.grad) for name, weight in named if weight.grad is not None}


def sum_costs(parts: Iterable[OpCosts], times: int = 1) -> OpCosts:
    """The sum of costs, `times` over."""
    total = OpCosts()
    for costs in parts:
        total.flops += times * costs.flops
        total.fp8_flops += times * costs.fp8_flops
        total.bytes_moved += times * costs.bytes_moved
        total.operators += times * costs.operators
        for key, calls in costs.calls.items():
            # A difference of two runs may have bytes without calls: one more layer enlarges a message.
            if calls or costs.messages[key]:
                total.messages[key] += times * costs.messages[key]
                total.calls[key] += times * calls
    return total


def join_segments(label: str, segments: Sequence[Segment]) -> Segment:
    """Consecutive segments as one."""
    net, peak, height = category_bytes({}), category_bytes({}), 0
    where = segments[0].where if segments else label
    for segment in segments:
        if net.sum() + segment.peak.sum() > height:
            peak, where = net + segment.peak, segment.where
            height = int(peak.sum())
        net = net + segment.net
    return Segment(label, net, peak, where, sum_costs([segment.costs for segment in segments]))


def _segment(label: str, changes: Sequence[tuple[object, int, str]], before: OpCosts, after: OpCosts) -> Segment:
    total, height, at = 0, 0, -1
    for number, (_, delta, _) in enumerate(changes):
        total += delta
        if total > height:
            height, at = total, number
    where = changes[at][2] if at >= 0 else label
    # Messages that the segment does not send are left out of the keys.
    costs = sum_costs([sum_costs([after, sum_costs([before], -1)])])
    return Segment(label, _sum_of(changes), _sum_of(changes[: at + 1]), where, costs)


def _sum_of(changes: Sequence[tuple[object, int, str]]) -> CategoryBytes:
    found: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for storage, delta, _ in changes:
        found[storage.category] += delta  # type: ignore[attr-defined]  # a Storage
    return category_bytes(found)
