"""Totals of a step without a pipeline, from a sample of five layers and three micro-batches.

Layers between the first and the last are identical, and so are micro-batches: the segments of one are repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.eligibility import SAMPLED_LAYERS, SAMPLED_MICRO_BATCHES
from titan_exp.plan.extrapolate.optimizer_step import (
    OptimizerStep,
    linear_combination,
    trace_optimizer_step,
)
from titan_exp.plan.extrapolate.small_run import small_run
from titan_exp.plan.trace.fake_world import fake_rank
from titan_exp.plan.trace.segments import (
    MICRO_BATCH,
    OPTIMIZER_STEP,
    CategoryBytes,
    EventSegment,
    Segment,
    SegmentTracker,
    category_bytes,
)
from titan_exp.plan.trace.trace_step import read_fields, trace_step


@dataclass(frozen=True)
class MicroBatchSegments:
    """Segments of one micro-batch."""

    before: list[Segment]
    """Before the first block."""
    forward: list[Segment]
    """One for each block, in order of execution."""
    between: list[Segment]
    """Head and loss."""
    backward: list[Segment]
    """One for each block, in order of execution."""
    after: list[Segment]
    """After the first block's backward pass."""


@dataclass(frozen=True)
class ModelSample:
    """A traced step of the small model."""

    base: CategoryBytes
    """Bytes allocated before the step, without batches."""
    batch: CategoryBytes
    """Bytes of a micro-batch."""
    batch_tensors: list[int]
    """The same, by tensor."""
    prologue: list[Segment]
    """Before the first micro-batch."""
    micro_batches: list[MicroBatchSegments]
    """In order."""
    event_segments: list[EventSegment]
    """Allocation events of two steps, the first of one micro-batch, if they were recorded."""
    reduced_gradients: list[dict[str, int]]
    """Allocations of reduced gradients by parameter name, for each step."""


def sample_model(experiment: Experiment, mode: str, *, cuda: bool, record_events: bool = False) -> ModelSample:
    """Trace a step of the run with few layers and micro-batches, all blocks in one activation checkpointing mode."""
    small = small_run(
        experiment,
        SAMPLED_LAYERS,
        min(ResolvedLayout.of(experiment).gradient_accumulation, SAMPLED_MICRO_BATCHES),
        mode,
    )
    tracker = SegmentTracker()
    with fake_rank(small, 0) as fake:
        trace_step(
            fake.state, fake.step, warmup_step=fake.warmup_step, batches=fake.batches, cuda=cuda, segments=tracker
        )
        segments = tracker.segments()
        batches = [tracker.tracked_by_category(tensor) for tensor in read_fields(tracker, fake.batches)]
        batch = sum(batches[: len(batches) // len(fake.batches)], category_bytes({}))
        tensors = [int(tensor.sum()) for tensor in batches[: len(batches) // len(fake.batches)]]
        base, event_segments = (
            tracker.allocated_before() - sum(batches, category_bytes({})),
            tracker.event_segments() if record_events else [],
        )
    prologue, rest = split_at(segments, lambda segment: segment.label == MICRO_BATCH)
    rest, _ = split_at(rest, lambda segment: segment.label == OPTIMIZER_STEP)
    found = []
    while rest:
        first, rest = rest[0], rest[1:]
        one, rest = split_at(rest, lambda segment: segment.label == MICRO_BATCH)
        found.append(_passes([first, *one]))
    return ModelSample(base, batch, tensors, prologue, found, event_segments, tracker.reduced_gradients)


def trace_optimizer_steps(experiment: Experiment, *, cuda: bool) -> tuple[OptimizerStep, OptimizerStep]:
    """Trace the optimizer step with one and with two layers."""
    one, two = (trace_optimizer_step(small_run(experiment, layers, 1, "none"), 0, cuda=cuda) for layers in (1, 2))
    return one, two


def extrapolate_optimizer_step(optimizer_steps: tuple[OptimizerStep, OptimizerStep], layers: int) -> OptimizerStep:
    """The optimizer step with `layers` layers, from those with one and with two."""
    return linear_combination([(2 - layers, optimizer_steps[0]), (layers - 1, optimizer_steps[1])])


def model_segments(samples: Sequence[ModelSample], modes: Sequence[int], micro_batches: int) -> list[Segment]:
    """Segments of a full step before the optimizer step, from one sample per mode and each block's mode."""
    segments = list(samples[0].prologue)
    few = len(samples[0].micro_batches)
    assert micro_batches >= few, "at least as many as sampled"
    order = [0, *[1] * (micro_batches - few + 1), *range(2, few)] if few > 1 else [0] * micro_batches
    for which in order:
        passes = [sample.micro_batches[which] for sample in samples]
        segments += passes[0].before
        segments += repeat_middle([micro_batch.forward for micro_batch in passes], modes)
        segments += passes[modes[-1]].between
        segments += repeat_middle([micro_batch.backward for micro_batch in passes], modes[::-1])
        segments += passes[modes[0]].after
    return segments


def repeat_middle(traced: Sequence[Sequence[Segment]], modes: Sequence[int]) -> Iterator[Segment]:
    """A segment for each of `len(modes)` blocks, in order of execution; the middle traced one is repeated."""
    few, total = len(traced[0]), len(modes)
    for place, mode in enumerate(modes):
        at = min(place, few // 2) if total - place > few // 2 else few - (total - place)
        yield traced[mode][at]


def split_at(segments: Sequence[Segment], ends: Callable[[Segment], bool]) -> tuple[list[Segment], list[Segment]]:
    """Segments before the first for which `ends` is true, and the rest."""
    place = next((place for place, segment in enumerate(segments) if ends(segment)), len(segments))
    return list(segments[:place]), list(segments[place:])


def _passes(segments: Sequence[Segment]) -> MicroBatchSegments:
    before, rest = split_at(segments, lambda segment: segment.label.startswith("forward, block"))
    forward, rest = split_at(rest, lambda segment: not segment.label.startswith("forward, block"))
    between, rest = split_at(rest, lambda segment: segment.label.startswith("backward, block"))
    backward, after = split_at(rest, lambda segment: not segment.label.startswith("backward, block"))
    return MicroBatchSegments(before, forward, between, backward, after)
