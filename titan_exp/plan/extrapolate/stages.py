"""Pipeline stages of a rank, and parts of its step with the sampled part that each repeats.

Without a pipeline, a rank has one stage of all layers, and its schedule is the loop over micro-batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.plan.extrapolate.eligibility import recompute_modes, sampled_edge
from titan_exp.plan.extrapolate.layer_kinds import last_blocks, repetition
from titan_exp.plan.extrapolate.sample_key import SampleKey, sample_keys
from titan_exp.plan.trace.step_position import GROUP, REDUCE, REST, SUM

WHOLE, FIRST, MIDDLE, LAST = "whole", "first", "middle", "last"
"""Kinds of stages: whole model; with the embedding, middle, with the head."""
SAMPLED_STAGES = {WHOLE: 0, FIRST: 0, MIDDLE: 1, LAST: 3}
"""Stage numbers in a sample, by kind."""
OTHER_RANK = 2
"""Number of the stage of a sample's other rank, which has one period of layers."""


class ExtrapolationError(Exception):
    """Samples do not determine the full step, which has to be traced."""


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
    distinct: int = 0
    """Number of first blocks that differ from the rest of the model."""
    period: int = 1
    """Number of other blocks after which their kinds repeat."""
    edge: int = 2
    """Blocks at each end that are not repeated, as in `eligibility.sampled_edge`."""
    last: int = 0
    """Number of last blocks that differ from the rest, as in `layer_kinds.last_blocks`."""

    @property
    def alike(self) -> int:
        """Number of blocks without last ones that differ."""
        return len(self.modes) - self.last

    def mode(self, place: int) -> int:
        """Index of a block's activation checkpointing mode; 0 for a stage without blocks."""
        return self.modes[place] if self.modes else 0

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
    (distinct, period), edge = repetition(experiment), sampled_edge(experiment)
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
            0 if stage else distinct,
            period,
            edge,
            0 if stage < len(layers) - 1 else last_blocks(experiment),
        )
        for stage, (rank, sample) in enumerate(zip(placement, sample_keys(experiment), strict=True))
        if rank == pipeline_rank
    ]


def action_parts(stage: StageShape, kind: str, blocks: Mapping[int, int]) -> Iterator[SampledPart]:
    """Parts of a stage's action in execution order. `blocks` has the number of blocks of each sampled stage."""
    places = range(len(stage.modes))
    first, last = (0, -1) if kind == "F" else (-1, 0)
    yield SampledPart(stage.mode(first), stage.sampled, None, f"{kind} before", None)
    for place in places if kind == "F" else reversed(places):
        sampled, block = sampled_block(stage, place, blocks)
        yield SampledPart(stage.modes[place], sampled, block, f"{kind} block", place)
    yield SampledPart(stage.mode(last), stage.sampled, None, f"{kind} after", None)
    if kind in "IW":
        yield SampledPart(stage.mode(last), stage.sampled, -1, kind + SUM, -1)
        for place in places:
            yield SampledPart(stage.modes[place], *sampled_block(stage, place, blocks), kind + SUM, place)


def reduction_parts(stage: StageShape, blocks: Mapping[int, int]) -> Iterator[SampledPart]:
    """Parts of a stage's gradient reduction, in order. A sample has groups only if FSDP shards parameters."""
    yield SampledPart(0, stage.sampled, None, REDUCE, None)
    yield SampledPart(0, stage.sampled, -1, GROUP, -1)
    for place in range(len(stage.modes)):
        yield SampledPart(0, *sampled_block(stage, place, blocks), GROUP, place)
    yield SampledPart(0, stage.sampled, None, REST, None)


def sampled_block(stage: StageShape, place: int, blocks: Mapping[int, int]) -> tuple[int, int]:
    """Sampled stage and block that a stage's block repeats.

    Blocks are counted from the nearer end where possible, because blocks prefetch and reduce for their neighbours.
    """
    few, left, alike = blocks[stage.sampled] - stage.last, stage.alike - place, place - stage.distinct
    if alike <= 0 or few == stage.alike or (alike < stage.edge < left):
        return stage.sampled, place
    if left <= stage.edge:
        return stage.sampled, few - left
    middle = stage.edge + (alike - stage.edge) % stage.period
    if few - stage.distinct >= 2 * stage.edge + stage.period:
        return stage.sampled, stage.distinct + middle
    return SAMPLED_STAGES[MIDDLE], middle


def first_layer(blocks: Mapping[int, int], stage: int) -> int:
    """Layer number of a sampled stage's first block."""
    return sum(blocks[number] for number in range(stage))
