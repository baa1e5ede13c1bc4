"""Sample of pipeline stages: a synthetic pipeline rank with every kind of stage and action, first and repeated.

Hidden states that stages hand to each other are left out: the schedule simulation counts them.
"""

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_parallel.transport import ActivationSpec
from titan_exp.plan.extrapolate.schedule_simulation import KINDS, ScheduledAction, simulate_schedule
from titan_exp.plan.extrapolate.small_run import small_pipeline
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import DEVICE, fake_rank
from titan_exp.plan.trace.segments import (
    ACTION,
    BETWEEN_ACTIONS,
    OPTIMIZER_STEP,
    REDUCE,
    CategoryBytes,
    EventSegment,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.trace_step import trace_step

FIRST, MIDDLE, LAST = "first", "middle", "last"
"""Kinds of stages: with the embedding, in between, with the head."""
PASSES = 2
_CATEGORY = {"received": "communication", "made": "activations", "objective": "loss"}


@dataclass(frozen=True)
class ActionSegments:
    """Segments of a stage's action."""

    before: list[Segment]
    """Before the first block."""
    blocks: list[Segment]
    """One for each block, in order of execution."""
    after: list[Segment]
    """After the last block."""
    handed_over: CategoryBytes
    """Bytes of handed-over hidden states that it allocates, less those that it releases."""


@dataclass(frozen=True)
class StageSample:
    """A traced step of the synthetic rank."""

    layers: dict[str, int]
    """Number of blocks by kind of stage."""
    base: CategoryBytes
    """Bytes allocated before the step, without batches and the stages' buffers."""
    buffers: CategoryBytes
    """Bytes of a stage's buffers."""
    batch: dict[str, CategoryBytes]
    """Bytes of a micro-batch, by field."""
    sizes: list[CategoryBytes]
    """Bytes of hidden states, by kind as in a simulation."""
    sends_complete: bool
    """True if sends complete at once."""
    prologue: Segment
    """Before the first action."""
    actions: dict[tuple[str, str, bool], ActionSegments]
    """Segments by kind of stage, kind of action, and True for the first of them."""
    reduction: dict[str, list[Segment]]
    """Segments of the gradient reduction, by kind of stage: for each parameter group, and the end."""
    message: OpCosts
    """Costs of one send and one receive."""
    schedule: list[ScheduledAction]
    """Its actions in a step, in order."""
    event_segments: list[EventSegment]
    """Allocation events of two steps, if they were recorded."""
    reduced_gradients: list[dict[str, int]]
    """Allocations of reduced gradients by parameter name, for each step."""
    action_results: list[int]
    """Allocations of action results in both steps, in order."""


def sampled_layers(*, lone: bool) -> dict[str, int]:
    """Number of blocks of the synthetic rank's stages, by kind; one each if `lone`."""
    return {FIRST: 1, MIDDLE: 1, LAST: 1} if lone else {FIRST: 2, MIDDLE: 3, LAST: 2}


def sample_stages(
    experiment: Experiment, mode: str, *, lone: bool, cuda: bool, record_events: bool = False
) -> StageSample:
    """Trace the synthetic rank in the layout of a run; `lone` asks for stages of a single block."""
    layers = sampled_layers(lone=lone)
    kinds, placement, orders = _pipeline(layers)
    tracker = SegmentTracker()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "everything.csv"
        path.write_text("\n".join(",".join(map(str, order)) for order in orders) + "\n")
        counts = [layers.get(kind, 1) for kind in kinds]
        small = small_pipeline(experiment, counts, PASSES, mode, degree=2, schedule=str(path))
        with fake_rank(small, 0) as fake:
            # Events include the first step, which has to run in full.
            first, batches = (None, ()) if record_events else (fake.warmup_step, fake.batches)
            trace_step(
                fake.state,
                fake.step,
                warmup_step=first,
                preallocated=fake.preallocated,
                batches=batches,
                cuda=cuda,
                segments=tracker,
            )
            segments = tracker.segments()
            batch = {
                field.name: tracker.tracked_by_category(value)
                for field in fields(fake.batches[0])
                if (value := getattr(fake.batches[0], field.name)) is not None
            }
            stages = [kind for kind, rank in zip(kinds, placement, strict=True) if rank == 0]
            buffers = category_bytes({"other": tracker.tracked_bytes(fake.state.model.parts[0].buffers())})
            base = tracker.allocated_before() - len(stages) * buffers - PASSES * sum(batch.values(), category_bytes({}))
            # On CUDA the host sees late that a send is complete (`schedule_simulation`).
            sends_complete = not cuda and _sends_complete()
            sizes, event_segments = (
                _sizes(tracker, ActivationSpec.of(ResolvedLayout.of(small), DEVICE)),
                tracker.event_segments() if record_events else [],
            )
    known = layers, base, buffers, batch, sizes, sends_complete
    return _group_segments(
        segments, kinds, placement, orders, known, event_segments, tracker.reduced_gradients, tracker.action_results
    )


def _group_segments(
    segments: Sequence[Segment],
    kinds: Sequence[str],
    placement: Sequence[int],
    orders: Schedule,
    known: Any,
    *events: Any,
) -> StageSample:
    layers, base, buffers, batch, sizes, sends_complete = known
    simulation = simulate_schedule(orders, placement, 0, passes=PASSES, sends_complete=sends_complete)
    actions = iter(simulation.actions)
    actions_by_key: dict[tuple[str, str, bool], ActionSegments] = {}
    reduction: dict[str, list[Segment]] = {}
    prologue, between, place = list[Segment](), list[Segment](), 0
    while segments[place].label != OPTIMIZER_STEP:
        label = segments[place].label
        end = place + 1
        if label.startswith(ACTION):
            while segments[end].label != BETWEEN_ACTIONS:
                end += 1
            scheduled = next(actions)
            change = [after - before for after, before in zip(scheduled.after, scheduled.before, strict=True)]
            handed_over = sum((count * size for count, size in zip(change, sizes, strict=True)), category_bytes({}))
            key = kinds[scheduled.action.stage], scheduled.action.kind, scheduled.first
            actions_by_key[key] = _action_segments(segments[place:end], handed_over)
        elif label.startswith(REDUCE):
            while not (segments[end].label.startswith(REDUCE) or segments[end].label == OPTIMIZER_STEP):
                end += 1
            reduction[kinds[int(label.split()[1])]] = list(segments[place:end])
        elif actions_by_key:
            between.append(segments[place])
        else:
            prologue.append(segments[place])
        place = end
    message = sum_costs([segment.costs for segment in between])
    each = OpCosts(bytes_moved=message.bytes_moved // simulation.sent, operators=message.operators // simulation.sent)
    for key, size in message.messages.items():
        each.messages[key], each.calls[key] = size // simulation.sent, message.calls[key] // simulation.sent
    opening, actions = join_segments("prologue", prologue), simulation.actions
    return StageSample(
        layers, base, buffers, batch, sizes, sends_complete, opening, actions_by_key, reduction, each, actions, *events
    )


def _pipeline(layers: Collection[str]) -> tuple[list[str], list[int], Schedule]:
    """Kinds of the stages, their ranks, and a schedule of one micro-batch forward and backward."""
    *own_kinds, last = layers
    kinds = [*own_kinds, "other", last]
    placement = [int(kind == "other") for kind in kinds]
    orders: Schedule = []
    for rank in (0, 1):
        own = [stage for stage, owner in enumerate(placement) if owner == rank]
        orders.append([*(Action(stage, "F", 0) for stage in own), *(Action(stage, "B", 0) for stage in reversed(own))])
    return kinds, placement, orders


def _sizes(tracker: SegmentTracker, hidden: ActivationSpec) -> list[CategoryBytes]:
    whole = torch.Size(hidden.shape).numel() * hidden.dtype.itemsize
    size = {"received": whole, "made": whole, "objective": torch.float32.itemsize}
    grain = tracker.granularity
    return [category_bytes({_CATEGORY[kind]: -(-size[kind] // grain) * grain}) for kind in KINDS]


def _sends_complete() -> bool:
    work = dist.isend(torch.empty(1), dst=1)
    return work is not None and work.is_completed()


def _action_segments(segments: Sequence[Segment], handed_over: CategoryBytes) -> ActionSegments:
    def is_block(segment: Segment) -> bool:
        return segment.label.partition(", ")[2].startswith("block")

    first = next((place for place, segment in enumerate(segments) if is_block(segment)), len(segments))
    end = next((place for place in range(first, len(segments)) if not is_block(segments[place])), len(segments))
    return ActionSegments(list(segments[:first]), list(segments[first:end]), list(segments[end:]), handed_over)
