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
from titan_exp.models.blocks.iter_blocks import iter_numbered_blocks
from titan_exp.parallel.step_observer import StepObserver
from titan_exp.plan.trace.dispatch_mode import CostMode, OpCosts
from titan_exp.plan.trace.kernel_classes import EMBEDDING, GRADIENTS, LOSS, NORM
from titan_exp.plan.trace.memory_tracker import CATEGORIES, MemoryTracker, Storage, local

STEP = "the step"
"""Label of the first segment of a step."""
MICRO_BATCH, TIED_SUM, OPTIMIZER_STEP = "micro-batch", "sum of tied gradients", "optimizer step"
SYNCHRONIZATION = "synchronization"
"""Label of what semi-synchronous training does between two steps."""
ACTION, BETWEEN_ACTIONS = "action", "between actions"
GRADIENT_SUM = "sum of gradients"
REDUCE, GROUP, FINAL = "reduce", "group", "final"
"""Labels of segments: of a micro-batch without a pipeline; of the sum of tied gradients between stages; from summed
gradients to the next step; of a pipeline action, and after it; of the sum of a parameter group's gradients in a split
backward pass; of a stage's gradient reduction, of each FSDP parameter
group in it, and of its end."""
CategoryBytes = NDArray[np.int64]
"""Bytes by category, in the order of `CATEGORIES`."""


def category_bytes(by_category: Mapping[str, int]) -> CategoryBytes:
    """Bytes by category as a vector."""
    return np.array([by_category.get(name, 0) for name in CATEGORIES], dtype=np.int64)


class AllocationEvent(NamedTuple):
    """Allocation or release of a storage, or the first matmul of a segment."""

    allocation: int
    """Number of the storage's allocation; `FORWARD_MATMUL` or `BACKWARD_MATMUL` for matmuls."""
    size: int = 0
    """Bytes allocated; 0 for a release."""
    stream: int = 0
    """Stream of an allocation; `HOST` for one in host memory."""
    category: str = ""
    """Final category of an allocation; empty for the phase's default."""
    output: bool = False
    """True for the hidden states that a block returns."""


FORWARD_MATMUL, BACKWARD_MATMUL = -1, -2
"""First matmul of a segment in each thread; the matmul library allocates a workspace on its first call."""
NOT_TRACKED = -3
"""Allocation number of a tensor that is not tracked."""


class GradientKey(NamedTuple):
    """Parameter of a rank, whichever layers it holds."""

    part: int
    """Index of its pipeline stage on this rank."""
    block: int | None
    """Index of its block in the stage; None outside blocks."""
    name: str
    """Name within the block, or in the model."""


@dataclass(frozen=True)
class Segment:
    """Part of a step."""

    label: str
    """Phase of the step, or an observer's label."""
    step: int
    """-1 for the build, 0 for the first step, 1 for the second."""
    net: CategoryBytes
    """Net allocated bytes, without those on the host."""
    peak: CategoryBytes
    """Bytes added at its first peak, without those on the host; zeros if it only frees."""
    where: str
    """Phase of the step."""
    begins_phase: bool
    """True if the segment begins its phase."""
    category: str
    """Default category of the phase."""
    costs: OpCosts
    """FLOPs, memory traffic and messages."""
    events: Sequence[AllocationEvent] = ()
    """Allocations and releases in order, if recorded."""


class SegmentTracker(MemoryTracker):
    """Memory tracker that also cuts a trace into segments."""

    _mode: CostMode | None = None

    def __init__(self) -> None:
        self._cuts: list[_Cut] = []
        self._recorded: list[tuple[Storage | None, AllocationEvent]] = []
        self.reduced_gradients: list[dict[GradientKey, int]] = []
        """Allocations of reduced gradients, for each step; set by `SegmentObserver`."""
        self.action_results: list[int] = []
        """Allocations of the results of pipeline actions, in order; set by `SegmentObserver`."""
        self.block_outputs: set[int] = set()
        """Allocations of block outputs."""
        self._default_category: set[int] = set()
        self._sizes: list[int] = [0]
        self._last_allocation, self._step = dict[int, int](), -1
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "where":
            self.cut(str(value), is_where=True)

    def read_costs_of(self, mode: CostMode) -> None:
        """Read the costs of segments from this mode."""
        self._mode = mode

    def begin_step(self) -> None:
        """Begin the evaluated step and its first segment."""
        super().begin_step()
        self.next_step()

    def next_step(self) -> None:
        """Begin a step."""
        self._step += 1
        self.cut(STEP)

    def cut(self, label: str, *, is_where: bool = False) -> None:
        """End a segment and begin another."""
        costs = OpCosts() if self._mode is None else sum_costs([self._mode.costs])
        cut = _Cut(
            len(self._recorded), label, self._step, getattr(self, "where", label), is_where, self.category, costs
        )
        self._cuts.append(cut)

    def mark_matmul(self, *, backward: bool) -> None:
        """Record the first matmul of a segment in this thread."""
        mark = BACKWARD_MATMUL if backward else FORWARD_MATMUL
        start = self._cuts[-1].start
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

    def segments(self) -> list[Segment]:
        """All segments that have ended, with their events."""
        return [self._segment(cut, following) for cut, following in pairwise(self._cuts)]

    def _segment(self, cut: "_Cut", following: "_Cut") -> Segment:
        net: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        peak, total, highest, events = dict(net), 0, 0, list[AllocationEvent]()
        for storage, event in self._recorded[cut.start : following.start]:
            events.append(self._with_category(storage, event))
            if storage is None or storage.on_host:
                continue
            delta = event.size or -self._sizes[event.allocation]
            net[storage.category] += delta
            total += delta
            if total > highest:
                highest, peak = total, dict(net)
        # The outer sum drops keys of messages that the segment does not send.
        costs = sum_costs([sum_costs([following.costs, sum_costs([cut.costs], -1)])])
        kept = cut.where, cut.begins_phase, cut.category, costs, events
        return Segment(cut.label, cut.step, category_bytes(net), category_bytes(peak), *kept)

    def _with_category(self, storage: Storage | None, event: AllocationEvent) -> AllocationEvent:
        if storage is None or not event.size:
            return event
        is_default = event.category == storage.category and event.allocation in self._default_category
        category = "" if is_default else storage.category
        return event._replace(category=category, output=event.allocation in self.block_outputs)

    def _add(self, storage: UntypedStorage, category: str | None, *, on_host: bool) -> None:
        known = len(self._sizes)
        super()._add(storage, category, on_host=on_host)
        if category is None and len(self._sizes) > known:
            self._default_category.add(known)

    def allocated_before(self) -> CategoryBytes:
        """Bytes allocated before the step."""
        held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for storage, size, _ in self._changes[: self._allocated_before]:
            held[storage.category] += size
        return category_bytes(held)

    def _record(self, storage: Storage, size: int, stream: int) -> None:
        super()._record(storage, size, stream)
        if size:
            self._last_allocation[storage.number] = len(self._sizes)
            self._sizes.append(size)
        event = AllocationEvent(self._last_allocation[storage.number], size, stream, storage.category)
        self._recorded.append((storage, event))


class _Cut(NamedTuple):
    """Start of a segment."""

    start: int
    """Number of the next recorded event."""
    label: str
    step: int
    where: str
    begins_phase: bool
    category: str
    costs: OpCosts
    """Costs of the step so far."""


class PhaseObserver(StepObserver):
    """Sets the class of kernels outside passes on a tracker, and the category of batches."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def action_begin(self, action: Action) -> None:
        """Begin a pipeline action: before its first block, batches are placed, or the loss is differentiated."""
        # The phase of the action before depends on the schedule.
        if action.kind == "F":
            self._begin("activations", "forward, embedding", EMBEDDING)
        else:
            self._begin("loss", "backward, head and loss", LOSS)

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Hidden states and gradients between stages are activations, also if a collective writes or reads them."""
        # The last stage's objective is a number.
        if result is not None and result.dim():
            self._tracker.set_category([result], "activations", is_final=True)

    def weight_gradients_begin(self, weights: Sequence[str]) -> None:
        """Begin the weight gradients of a block; those outside of blocks belong to the phase before."""
        if weights[0].startswith("blocks."):
            self._begin("activations", f"backward, block {weights[0].split('.')[1]}", "")

    def gradient_group_begin(self) -> None:
        """Begin the sum of a parameter group's gradients."""
        self._begin("activations", GRADIENT_SUM, GRADIENTS)

    def stage_reduction_begin(self, stage: int) -> None:
        """Begin the gradient reduction of a stage."""
        self._tracker.outside_passes = GRADIENTS

    def tied_sum_begin(self) -> None:
        """Begin the sum of tied gradients."""
        self._tracker.outside_passes = GRADIENTS

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """End the passes of the step."""
        self._tracker.outside_passes = NORM

    def _begin(self, category: str, where: str, outside_passes: str) -> None:
        tracker = self._tracker
        tracker.category, tracker.where, tracker.outside_passes = category, where, outside_passes


class SegmentObserver(PhaseObserver):
    """Ends a segment at each start of a micro-batch, pipeline action, gradient reduction or optimizer step."""

    _tracker: SegmentTracker

    def __init__(self, tracker: SegmentTracker) -> None:
        super().__init__(tracker)

    def microbatch_begin(self, index: int) -> None:
        """Begin a micro-batch."""
        self._tracker.cut(MICRO_BATCH)

    def action_begin(self, action: Action) -> None:
        """Begin a pipeline action; its phase begins in its own segment."""
        self._tracker.cut(f"{ACTION} {action.stage}")
        super().action_begin(action)

    def action_end(self, action: Action, result: Tensor | None) -> None:
        """Begin the segment between two pipeline actions."""
        super().action_end(action, result)
        self._tracker.action_results.append(NOT_TRACKED if result is None else self._tracker.allocation_of(result))
        self._tracker.cut(BETWEEN_ACTIONS)

    def stage_reduction_begin(self, stage: int) -> None:
        """Begin the gradient reduction of a stage."""
        super().stage_reduction_begin(stage)
        self._tracker.cut(f"{REDUCE} {stage}")

    def group_reduction_begin(self) -> None:
        """Begin the gradient reduction of an FSDP parameter group."""
        self._tracker.cut(GROUP)

    def stage_reduction_end(self) -> None:
        """Begin the wait for the reductions of a stage."""
        self._tracker.cut(FINAL)

    def tied_sum_begin(self) -> None:
        """Begin the sum of tied gradients."""
        super().tied_sum_begin()
        self._tracker.cut(TIED_SUM)

    def gradients_ready(self, parts: Sequence[nn.Module]) -> None:
        """Begin the optimizer step, and record the storages of gradients."""
        self._tracker.reduced_gradients.append(_gradient_allocations(self._tracker, parts))
        self._tracker.cut(OPTIMIZER_STEP)
        super().gradients_ready(parts)


def _gradient_allocations(tracker: SegmentTracker, parts: Sequence[nn.Module]) -> dict[GradientKey, int]:
    found = dict[GradientKey, int]()
    for place, part in enumerate(parts):
        blocks = [block for _, block in iter_numbered_blocks(part)]
        in_blocks = {
            id(weight): (number, name)
            for number, block in enumerate(blocks)
            for name, weight in block.named_parameters()
        }
        for name, weight in part.named_parameters():
            if weight.grad is not None:
                key = GradientKey(place, *in_blocks.get(id(weight), (None, name)))
                found[key] = tracker.allocation_of(weight.grad)
    return found


def sum_costs(parts: Iterable[OpCosts], times: int = 1) -> OpCosts:
    """Sum of costs, multiplied by `times`."""
    total = OpCosts()
    for costs in parts:
        total.flops += times * costs.flops
        total.fp8_flops += times * costs.fp8_flops
        total.bytes_moved += times * costs.bytes_moved
        total.host_bytes += times * costs.host_bytes
        total.operators += times * costs.operators
        for key, calls in costs.calls.items():
            # A difference of two runs may have bytes without calls: one more layer enlarges a message.
            if calls or costs.messages[key]:
                total.messages[key] += times * costs.messages[key]
                total.calls[key] += times * calls
        for kernel, count in costs.kernels.items():
            if count:
                total.kernels[kernel] += times * count
    return total


def join_segments(label: str, segments: Sequence[Segment]) -> Segment:
    """Merge consecutive segments into one."""
    net, peak, height = category_bytes({}), category_bytes({}), 0
    where = segments[0].where if segments else label
    for segment in segments:
        if net.sum() + segment.peak.sum() > height:
            peak, where = net + segment.peak, segment.where
            height = int(peak.sum())
        net = net + segment.net
    return Segment(label, 1, net, peak, where, False, "", sum_costs([segment.costs for segment in segments]))
