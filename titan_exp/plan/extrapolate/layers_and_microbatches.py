"""A step without a pipeline, put together from that of a model of five layers and three micro-batches.

Layers between the first and the last are alike, and so are micro-batches: what is traced of one of them is repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.eligibility import SAMPLED_LAYERS, SAMPLED_MICRO_BATCHES
from titan_exp.plan.extrapolate.optimizer_step import (
    OPTIMIZER_STEP,
    OptimizerStep,
    linear_combination,
    marked_tail,
    trace_optimizer_step,
)
from titan_exp.plan.extrapolate.segments import CategoryBytes, EventSegment, Segment, SegmentTracker, category_bytes
from titan_exp.plan.trace.fake_world import fake_rank
from titan_exp.plan.trace.trace_step import looked_at, trace_step
from titan_exp.trainer import forward_backward as trainer_model

MICRO_BATCH = "micro-batch"


@dataclass(frozen=True)
class MicroBatchSegments:
    """Forward and backward of one micro-batch."""

    before: list[Segment]
    """Up to the first block."""
    forward: list[Segment]
    """Of each block, in order of execution."""
    between: list[Segment]
    """Head and loss."""
    backward: list[Segment]
    """Of each block, in order of execution."""
    after: list[Segment]
    """From the first block on."""


@dataclass(frozen=True)
class ModelSample:
    """A step of the small model."""

    base: CategoryBytes
    """What is held before it, less batches."""
    batch: CategoryBytes
    """What a micro-batch holds."""
    looked_at: list[int]
    """The same, tensor by tensor."""
    prologue: list[Segment]
    """What comes before the first micro-batch."""
    micro_batches: list[MicroBatchSegments]
    """Each of them."""
    scenes: list[EventSegment]
    """Two steps, the first of one micro-batch, as an allocator is told them; none where nobody asked."""
    reduced: list[dict[str, int]]
    """Of each step: births of reduced gradients, by the names of their parameters."""


def sample_model(experiment: Experiment, mode: str, *, cuda: bool, told: bool = False) -> ModelSample:
    """Trace a step of the same run with few layers and few micro-batches, every block recomputed by this mode.

    Args:
        experiment: the run, its layout resolved.
        mode: how every block is recomputed.
        cuda: as of `trace_step`.
        told: whether births and deaths are wanted too.
    """
    small = small_run(
        experiment,
        SAMPLED_LAYERS,
        min(ResolvedLayout.of(experiment).gradient_accumulation, SAMPLED_MICRO_BATCHES),
        mode,
    )
    tape = SegmentTracker()
    with fake_rank(small, 0) as it, marked_tail(tape), _marked_micro_batches(tape):
        trace_step(it.state, it.step, warmup_step=it.warmup_step, batches=it.batches, cuda=cuda, segments=tape)
        pieces = tape.pieces()
        batches = [tape.amount(tensor) for tensor in looked_at(tape, it.batches)]
        batch = sum(batches[: len(batches) // len(it.batches)], category_bytes({}))
        tensors = [int(each.sum()) for each in batches[: len(batches) // len(it.batches)]]
        base, scenes = tape.base() - sum(batches, category_bytes({})), tape.scenes() if told else []
    prologue, rest = until(pieces, lambda piece: piece.label == MICRO_BATCH)
    rest, _ = until(rest, lambda piece: piece.label == OPTIMIZER_STEP)
    found = []
    while rest:
        first, rest = rest[0], rest[1:]
        one, rest = until(rest, lambda piece: piece.label == MICRO_BATCH)
        found.append(_passes([first, *one]))
    return ModelSample(base, batch, tensors, prologue, found, scenes, tape.reduced)


def small_run(experiment: Experiment, layers: int, micro_batches: int, mode: str) -> Experiment:
    """The same run, its layout resolved, of so many layers and micro-batches."""
    layout = ResolvedLayout.of(experiment)
    size = layout.micro_batch_size
    batch = layout.dp_degree * size * micro_batches
    return replace(
        experiment,
        model=replace(experiment.model, layers=layers),
        training=replace(experiment.training, global_batch_size=batch, micro_batch_size=size),
        activation_checkpoint=replace(experiment.activation_checkpoint, mode=mode),
    )


def trace_optimizer_steps(experiment: Experiment, *, cuda: bool) -> tuple[OptimizerStep, OptimizerStep]:
    """The ends of a step with one and with two layers."""
    one, two = (trace_optimizer_step(small_run(experiment, layers, 1, "none"), 0, cuda=cuda) for layers in (1, 2))
    return one, two


def extrapolate_optimizer_step(tails: tuple[OptimizerStep, OptimizerStep], layers: int) -> OptimizerStep:
    """The end of a step with so many layers, from those with one and with two."""
    return linear_combination([(2 - layers, tails[0]), (layers - 1, tails[1])])


def model_segments(samples: Sequence[ModelSample], modes: Sequence[int], micro_batches: int) -> list[Segment]:
    """The pieces of a step but its end.

    Args:
        samples: one for each way of recomputation.
        modes: of each block, which of these it has.
        micro_batches: of the step.
    """
    pieces = list(samples[0].prologue)
    few = len(samples[0].micro_batches)
    assert micro_batches >= few, "as many as there are, or more"
    order = [0, *[1] * (micro_batches - few + 1), *range(2, few)] if few > 1 else [0] * micro_batches
    for which in order:
        passes = [sample.micro_batches[which] for sample in samples]
        pieces += passes[0].before
        pieces += repeat_middle([its.forward for its in passes], modes)
        pieces += passes[modes[-1]].between
        pieces += repeat_middle([its.backward for its in passes], modes[::-1])
        pieces += passes[modes[0]].after
    return pieces


def repeat_middle(traced: Sequence[Sequence[Segment]], modes: Sequence[int]) -> Iterator[Segment]:
    """A piece for each of `len(modes)` blocks, in order of execution, of which the middle one traced is repeated."""
    few, total = len(traced[0]), len(modes)
    for place, mode in enumerate(modes):
        at = min(place, few // 2) if total - place > few // 2 else few - (total - place)
        yield traced[mode][at]


def until(pieces: Sequence[Segment], ends: Callable[[Segment], bool]) -> tuple[list[Segment], list[Segment]]:
    """Pieces before the first that ends them, and the others."""
    place = next((place for place, piece in enumerate(pieces) if ends(piece)), len(pieces))
    return list(pieces[:place]), list(pieces[place:])


def _passes(pieces: Sequence[Segment]) -> MicroBatchSegments:
    before, rest = until(pieces, lambda piece: piece.label.startswith("forward, block"))
    forward, rest = until(rest, lambda piece: not piece.label.startswith("forward, block"))
    between, rest = until(rest, lambda piece: piece.label.startswith("backward, block"))
    backward, after = until(rest, lambda piece: not piece.label.startswith("backward, block"))
    return MicroBatchSegments(before, forward, between, backward, after)


@contextmanager
def _marked_micro_batches(tape: SegmentTracker) -> Iterator[None]:
    original = trainer_model.set_gradient_sync

    def marked(*args: Any, **kwargs: Any) -> None:
        tape.cut(MICRO_BATCH)
        original(*args, **kwargs)

    with patch.object(trainer_model, "set_gradient_sync", marked):
        yield
