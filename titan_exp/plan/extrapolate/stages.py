"""Totals of a pipeline rank's step, from the sampled rank's along its simulated schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStep, linear_combination, trace_optimizer_step
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation
from titan_exp.plan.extrapolate.small_run import small_pipeline
from titan_exp.plan.extrapolate.stage_sample import FIRST, LAST, MIDDLE, ActionSegments, StageSample
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.segments import CategoryBytes, Segment, category_bytes, join_segments, sum_costs


@dataclass(frozen=True)
class StageShape:
    """A pipeline stage: its kind and its blocks."""

    number: int
    """Stage number."""
    kind: str
    """`FIRST`, `MIDDLE` or `LAST`."""
    modes: tuple[int, ...]
    """Index of each block's activation checkpointing mode."""


@dataclass(frozen=True)
class StageOptimizerSteps:
    """Optimizer step of any pipeline rank, as a linear function of its stages."""

    constant: OptimizerStep
    """Constant part."""
    block: OptimizerStep
    """Added by a block."""
    first: OptimizerStep
    """Added by the embedding."""
    last: OptimizerStep
    """Added by the head."""

    def of(self, stages: Sequence[StageShape]) -> OptimizerStep:
        """Optimizer step of a rank with these stages."""
        kinds = [stage.kind for stage in stages]
        blocks = sum(len(stage.modes) for stage in stages)
        terms = [(blocks, self.block), (kinds.count(FIRST), self.first), (kinds.count(LAST), self.last)]
        return linear_combination([*terms, (1, self.constant)])

    def of_sample(self, sample: StageSample) -> OptimizerStep:
        """Optimizer step of the sampled rank."""
        return self.of([StageShape(0, kind, (0,) * count) for kind, count in sample.layers.items()])


def trace_stage_optimizer_steps(experiment: Experiment, *, cuda: bool) -> StageOptimizerSteps:
    """Trace optimizer steps of small pipeline ranks."""

    def optimizer_step(rank: int, layers: tuple[int, ...]) -> OptimizerStep:
        small = small_pipeline(experiment, layers, 1, "none", degree=3, schedule="1F1B")
        return trace_optimizer_step(small, rank * ResolvedLayout.of(small).world_size // 3, cuda=cuda)

    first, one, last = (optimizer_step(rank, (1, 1, 1)) for rank in range(3))
    block = linear_combination([(-1, one), (1, optimizer_step(1, (1, 2, 1)))])
    return StageOptimizerSteps(
        linear_combination([(1, one), (-1, block)]),
        block,
        linear_combination([(-1, one), (1, first)]),
        linear_combination([(-1, one), (1, last)]),
    )


def action_segment(samples: Sequence[StageSample], stage: StageShape, kind: str, first: bool) -> Segment:
    """An action of a stage, without handed-over hidden states."""
    own = [sample.actions[stage.kind, kind, first] for sample in samples]
    middle = [sample.actions[MIDDLE, kind, first] for sample in samples]
    modes = stage.modes if kind == "F" else stage.modes[::-1]
    segments = [*own[modes[0]].before, *_blocks(own, middle, modes), *own[modes[-1]].after]
    whole = join_segments(kind, segments)
    return replace(whole, net=whole.net - own[0].handed_over)


def reduction_segments(sample: StageSample, stage: StageShape) -> Iterator[Segment]:
    """Gradient reduction of a stage, by parameter group."""
    own, middle = sample.reduction[stage.kind], sample.reduction[MIDDLE]
    groups = [segment for segment in own if segment.label == "group"]
    rest = [segment for segment in own if segment.label != "group"]
    more = [segment for segment in middle if segment.label == "group"]
    yield rest[0]
    if groups:
        ends = sample.layers[stage.kind]
        # The group of the stage's other parameters precedes those of its blocks.
        yield from groups[: len(groups) - ends + 1]
        yield from more[1:2] * (len(stage.modes) - 2)
        yield from groups[len(groups) - ends + 1 :][-1:]
    yield from rest[1:]


def bytes_before_step(
    sample: StageSample,
    optimizer_steps: StageOptimizerSteps,
    stages: Sequence[StageShape],
    batches: int,
    *,
    shared: bool,
) -> CategoryBytes:
    """Bytes allocated before a step. `shared` is True with context parallelism: every stage reads all batch fields."""
    kinds = {stage.kind for stage in stages}
    seen = [
        size
        for name, size in sample.batch.items()
        if shared or name not in ("tokens", "labels") or (FIRST if name == "tokens" else LAST) in kinds
    ]
    kept = optimizer_steps.of(stages).persistent - optimizer_steps.of_sample(sample).persistent
    return sample.base + kept + len(stages) * sample.buffers + batches * sum(seen, category_bytes({}))


def schedule_segment(
    sample: StageSample, simulation: ScheduleSimulation, actions: dict[tuple[int, str, bool], Segment]
) -> Segment:
    """All actions of a step and the messages between them, as one segment."""
    sizes = np.stack(sample.sizes)
    keys = [(scheduled.action.stage, scheduled.action.kind, scheduled.first) for scheduled in simulation.actions]
    names = list(dict.fromkeys(keys))
    which = np.array([names.index(key) for key in keys])
    nets = np.stack([actions[name].net for name in names])
    peaks = np.stack([actions[name].peak for name in names])
    ends = np.cumsum(nets[which], axis=0)
    begins = ends - nets[which]
    waiting = begins + np.array([scheduled.waiting for scheduled in simulation.actions]) @ sizes
    working = begins + np.array([scheduled.before for scheduled in simulation.actions]) @ sizes + peaks[which]
    moments = np.stack([waiting, working], axis=1).reshape(-1, waiting.shape[1])
    totals = moments.sum(axis=1)
    at = int(totals.argmax())
    where = actions[keys[at // 2]].where
    counts = np.bincount(which, minlength=len(names))
    costs = OpCosts()
    for name, count in zip(names, counts, strict=True):
        costs = sum_costs([costs, sum_costs([actions[name].costs], int(count))])
    costs = sum_costs([costs, sum_costs([sample.message], simulation.sent)])
    peak = moments[at] if totals[at] > 0 else category_bytes({})
    return Segment("actions", ends[-1], peak, where, costs)


def _blocks(own: Sequence[ActionSegments], middle: Sequence[ActionSegments], modes: Sequence[int]) -> Iterator[Segment]:
    for place, mode in enumerate(modes):
        if place in (0, len(modes) - 1):
            yield own[mode].blocks[0 if place == 0 else -1]
        else:
            yield (own[mode].blocks if len(own[mode].blocks) > 2 else middle[mode].blocks)[1]
