"""Pipeline stages of a rank, and keys of the samples that they share.

Without a pipeline, a rank has one stage of all layers, and its schedule is the loop over micro-batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.plan.extrapolate.eligibility import recompute_modes, stage_sizes
from titan_exp.plan.time.roofline import schedule_and_bubble

WHOLE, FIRST, MIDDLE, LAST = "whole", "first", "middle", "last"
"""Kinds of stages: whole model; with the embedding, middle, with the head."""
SAMPLED_STAGES = {WHOLE: 0, FIRST: 0, MIDDLE: 1, LAST: 3}
"""Stage numbers in a sample, by kind."""
OTHER_RANK = 2
"""Number of the stage of a sample's other rank, which has one period of layers."""


class ExtrapolationError(Exception):
    """Samples do not determine the full step, which has to be traced."""


class SampleKey(NamedTuple):
    """Everything that distinguishes the samples of a run's stages."""

    size: int | None
    """Size of the stages, as in `eligibility.stage_sizes`."""
    ways: tuple[str, ...]
    """Backward passes of its micro-batches, as in `backward_ways`."""
    resharded: bool = False
    """True if parameters are gathered again for each micro-batch."""

    @property
    def order(self) -> Iterator[tuple[str, int]]:
        """Kinds and micro-batches of a sampled stage's actions.

        With `resharded`, passes find parameters as the pass before leaves them: forward passes follow none, a forward
        and a backward pass, and later backward passes either.
        """
        if self.resharded:
            return zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True)
        return ((kind, micro) for micro, way in enumerate(self.ways) for kind in "F" + way)


@dataclass(frozen=True)
class StageShape:
    """Kind and blocks of a stage."""

    number: int
    """Stage number."""
    kind: str
    """`WHOLE`, `FIRST`, `MIDDLE` or `LAST`."""
    layers: tuple[int, ...]
    """Number of each block in the model."""
    modes: tuple[int, ...]
    """Index of each block's activation checkpointing mode."""
    sample: SampleKey
    """Key of its samples."""

    def mode(self, place: int) -> int:
        """Index of a block's activation checkpointing mode; 0 for a stage without blocks."""
        return self.modes[place] if self.modes else 0

    def last_mode(self, kind: str) -> int:
        """Mode of the block that an action of a kind passes last."""
        return self.mode(-1 if kind == "F" else 0)

    @property
    def sampled(self) -> int:
        """Stage number in a sample."""
        return SAMPLED_STAGES[self.kind]


class SampledPart(NamedTuple):
    """Part of a stage's action or gradient reduction, and the sampled part that it repeats."""

    mode: int
    """Index of the activation checkpointing mode whose sample it repeats."""
    stage: int
    """Stage in that sample."""
    block: int | None
    """Block of that stage."""
    part: str
    """Part of the step, as in `StepPosition`."""
    place: int | None
    """Block of the full model's stage."""


def stages_of(experiment: Experiment, pipeline_rank: int) -> list[StageShape]:
    """Stages of a pipeline rank."""
    layout, mtp = ResolvedLayout.of(experiment), mtp_depth(experiment.model)
    _, modes = recompute_modes(experiment.activation_checkpoint, layout.layers + mtp)
    pipeline = layout.parallelism.pp > 1
    *layers, last = layout.stage_layers if pipeline else [[*range(layout.layers)]]
    layers = [*layers, [*last, *range(layout.layers, layout.layers + mtp)]]
    kinds = [FIRST, *[MIDDLE] * (len(layers) - 2), LAST] if pipeline else [WHOLE]
    placement = layout.stage_placement if pipeline else [0]
    return [
        StageShape(
            stage,
            kinds[stage],
            tuple(layers[stage]),
            tuple(modes[layer] for layer in layers[stage]),
            sample,
        )
        for stage, (rank, sample) in enumerate(zip(placement, sample_keys(experiment), strict=True))
        if rank == pipeline_rank
    ]


def first_layer(blocks: Mapping[int, int], stage: int) -> int:
    """Layer number of a sampled stage's first block."""
    return sum(blocks[number] for number in range(stage))


def sample_keys(experiment: Experiment) -> list[SampleKey]:
    """Key of the samples of each pipeline stage."""
    layout, sizes = ResolvedLayout.of(experiment), stage_sizes(experiment)
    if layout.parallelism.pp > 1 and layout.reshard_policy != "never":
        return [SampleKey(size, ("B", "B", "B"), resharded=True) for size in sizes]
    if not layout.splits_backward:
        return [SampleKey(size, ("B", "B")) for size in sizes]
    schedule = layout.parallelism.pp_schedule, layout.parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    ways = backward_ways(schedule_and_bubble(*schedule)[0])
    return [SampleKey(size, ways[stage]) for stage, size in enumerate(sizes)]


def backward_ways(orders: Schedule) -> dict[int, tuple[str, ...]]:
    """Backward passes of a sample's micro-batches, by stage: `B` is a full one, `IW` a split one.

    The first is that of the stage, which allocates its gradients; then each of the schedule's, repeated.
    """
    ways = {"B": "B", "I": "IW"}
    found = [(action.stage, ways[action.kind]) for order in orders for action in order if action.kind in ways]
    later = sorted({way for _, way in found})
    return {stage: (way, *later) for stage, way in reversed(found)}
