"""A pipeline rank's step, put together from the sampled rank's, its schedule rehearsed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStep, linear_combination, trace_optimizer_step
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation
from titan_exp.plan.extrapolate.segments import CategoryBytes, Segment, category_bytes, join_segments, sum_costs
from titan_exp.plan.extrapolate.stage_sample import FIRST, LAST, MIDDLE, ActionSegments, StageSample
from titan_exp.plan.trace.dispatch_mode import OpCosts


@dataclass(frozen=True)
class StageShape:
    """A stage."""

    number: int
    """Which of all."""
    kind: str
    """First, middle or last."""
    modes: tuple[int, ...]
    """Of each of its blocks, which of the ways of recomputation it has."""


@dataclass(frozen=True)
class StageOptimizerSteps:
    """The end of a step of any rank of a pipeline."""

    constant: OptimizerStep
    """Of a rank without anything."""
    block: OptimizerStep
    """What a block adds."""
    first: OptimizerStep
    """What the embedding adds."""
    last: OptimizerStep
    """What the head adds."""

    def of(self, stages: Sequence[StageShape]) -> OptimizerStep:
        """That of a rank with these stages."""
        kinds = [stage.kind for stage in stages]
        blocks = sum(len(stage.modes) for stage in stages)
        terms = [(blocks, self.block), (kinds.count(FIRST), self.first), (kinds.count(LAST), self.last)]
        return linear_combination([*terms, (1, self.constant)])

    def of_sample(self, sample: StageSample) -> OptimizerStep:
        """That of the sampled rank."""
        return self.of([StageShape(0, kind, (0,) * count) for kind, count in sample.layers.items()])


def trace_stage_optimizer_steps(experiment: Experiment, *, cuda: bool) -> StageOptimizerSteps:
    """Trace the ends of the step of small ranks."""

    def tail(rank: int, layers: tuple[int, ...]) -> OptimizerStep:
        size = ResolvedLayout.of(experiment).micro_batch_size
        parallelism = replace(
            experiment.parallelism,
            pp=3,
            pp_schedule="1F1B",
            pp_microbatches=1,
            pp_layers=layers,
            pp_layers_per_stage=None,
            pp_first_stage_less=0,
            pp_last_stage_less=0,
        )
        small = replace(
            experiment,
            model=replace(experiment.model, layers=sum(layers)),
            parallelism=parallelism,
            training=replace(
                experiment.training,
                global_batch_size=ResolvedLayout.of(experiment).dp_degree * size,
                micro_batch_size=size,
            ),
            activation_checkpoint=replace(experiment.activation_checkpoint, mode="none"),
        )
        return trace_optimizer_step(small, rank * ResolvedLayout.of(small).world_size // 3, cuda=cuda)

    first, one, last = (tail(rank, (1, 1, 1)) for rank in range(3))
    block = linear_combination([(-1, one), (1, tail(1, (1, 2, 1)))])
    return StageOptimizerSteps(
        linear_combination([(1, one), (-1, block)]),
        block,
        linear_combination([(-1, one), (1, first)]),
        linear_combination([(-1, one), (1, last)]),
    )


def action_segment(samples: Sequence[StageSample], stage: StageShape, kind: str, first: bool) -> Segment:
    """What an action of a stage takes, hidden states that are handed over left out of what it leaves behind."""
    own = [sample.actions[stage.kind, kind, first] for sample in samples]
    middle = [sample.actions[MIDDLE, kind, first] for sample in samples]
    modes = stage.modes if kind == "F" else stage.modes[::-1]
    pieces = [*own[modes[0]].before, *_blocks(own, middle, modes), *own[modes[-1]].after]
    whole = join_segments(kind, pieces)
    return replace(whole, net=whole.net - own[0].handed)


def reduction_segments(sample: StageSample, stage: StageShape) -> Iterator[Segment]:
    """Reducing the gradients of a stage, group by group."""
    own, middle = sample.reduction[stage.kind], sample.reduction[MIDDLE]
    groups = [piece for piece in own if piece.label == "group"]
    rest = [piece for piece in own if piece.label != "group"]
    more = [piece for piece in middle if piece.label == "group"]
    yield rest[0]
    if groups:
        ends = sample.layers[stage.kind]
        # Before the blocks' groups comes that of what else a stage has.
        yield from groups[: len(groups) - ends + 1]
        yield from more[1:2] * (len(stage.modes) - 2)
        yield from groups[len(groups) - ends + 1 :][-1:]
    yield from rest[1:]


def bytes_before_step(
    sample: StageSample, tails: StageOptimizerSteps, stages: Sequence[StageShape], batches: int, *, shared: bool
) -> CategoryBytes:
    """What a rank holds before a step.

    Args:
        sample: of the same layout but for the pipeline.
        tails: likewise.
        stages: of the rank.
        batches: micro-batches that it has looked at.
        shared: whether sequences are shared among ranks, so that all of a batch is looked at by all.
    """
    kinds = {stage.kind for stage in stages}
    seen = [
        size
        for name, size in sample.batch.items()
        if shared or name not in ("tokens", "labels") or (FIRST if name == "tokens" else LAST) in kinds
    ]
    kept = tails.of(stages).persistent - tails.of_sample(sample).persistent
    return sample.base + kept + len(stages) * sample.buffers + batches * sum(seen, category_bytes({}))


def schedule_segment(
    sample: StageSample, rehearsal: ScheduleSimulation, actions: dict[tuple[int, str, bool], Segment]
) -> Segment:
    """All actions of a step, with the messages between them, as one piece."""
    sizes = np.stack(sample.sizes)
    keys = [(turn.action.stage, turn.action.kind, turn.first) for turn in rehearsal.turns]
    names = list(dict.fromkeys(keys))
    which = np.array([names.index(key) for key in keys])
    nets = np.stack([actions[name].net for name in names])
    mosts = np.stack([actions[name].peak for name in names])
    ends = np.cumsum(nets[which], axis=0)
    begins = ends - nets[which]
    waiting = begins + np.array([turn.waiting for turn in rehearsal.turns]) @ sizes
    working = begins + np.array([turn.before for turn in rehearsal.turns]) @ sizes + mosts[which]
    moments = np.stack([waiting, working], axis=1).reshape(-1, waiting.shape[1])
    totals = moments.sum(axis=1)
    at = int(totals.argmax())
    where = actions[keys[at // 2]].where
    counts = np.bincount(which, minlength=len(names))
    work = OpCosts()
    for name, count in zip(names, counts, strict=True):
        work = sum_costs([work, sum_costs([actions[name].costs], int(count))])
    work = sum_costs([work, sum_costs([sample.message], rehearsal.sent)])
    most = moments[at] if totals[at] > 0 else category_bytes({})
    return Segment("actions", ends[-1], most, where, work)


def _blocks(own: Sequence[ActionSegments], middle: Sequence[ActionSegments], modes: Sequence[int]) -> Iterator[Segment]:
    for place, mode in enumerate(modes):
        if place in (0, len(modes) - 1):
            yield own[mode].blocks[0 if place == 0 else -1]
        else:
            yield (own[mode].blocks if len(own[mode].blocks) > 2 else middle[mode].blocks)[1]
