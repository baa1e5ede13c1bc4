"""A rank's step from those of small runs: identical layers and micro-batches are traced once.

What comes out equals the trace of the whole. Where that is not known to be so, there is no shortcut, and
`alike.why_not` says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.extrapolate.eligibility import LAYERS, recomputation
from titan_exp.plan.extrapolate.layers_and_microbatches import (
    WholeSample,
    sample_whole,
    tail_of,
    whole_pieces,
    whole_tails,
)
from titan_exp.plan.extrapolate.optimizer_step import Tail
from titan_exp.plan.extrapolate.schedule_simulation import Rehearsal, rehearse
from titan_exp.plan.extrapolate.segments import Amounts, Piece, added
from titan_exp.plan.extrapolate.stage_sample import FIRST, LAST, MIDDLE, StageSample, sample_stages
from titan_exp.plan.extrapolate.stages import (
    StageShape,
    StageTails,
    action_piece,
    base_of,
    played,
    reduction_pieces,
    trace_stage_tails,
)
from titan_exp.plan.trace.dispatch_mode import Work
from titan_exp.plan.trace.memory_ledger import CATEGORIES, Moment


@dataclass(frozen=True)
class Extended:
    """What a step takes, as its trace would tell."""

    peak: Moment
    """When most memory is held."""
    kept: dict[str, int]
    """Parameters and the optimizer's state, bytes held between steps."""
    gradients: int
    """Bytes of this rank's reduced gradients, as the optimizer takes them."""
    work: Work
    """Operations, bytes and messages of the step."""


@dataclass(frozen=True)
class Parts:
    """What steps are put together from that differ in layers, schedule and number of micro-batches alone."""

    whole: Sequence[WholeSample]
    """Without a pipeline: a sample for each way of recomputation."""
    whole_tails: tuple[Tail, Tail] | None
    """Likewise; None where births and deaths are told, whose ends are those of a rank with all layers."""
    stages: Mapping[bool, Sequence[StageSample]]
    """With one: samples likewise, for stages of several blocks and for those of one."""
    stage_tails: StageTails | None
    """Likewise."""


def trace_parts(experiment: Experiment, *, cuda: bool, told: bool = False) -> Parts:
    """Trace what the steps of a run, its layout resolved, are put together from.

    Args:
        experiment: the run.
        cuda: as of `trace_step`.
        told: whether births and deaths of storages are wanted too.
    """
    modes, _ = recomputation(experiment)
    if experiment.parallelism.pp == 1:
        whole = [sample_whole(experiment, mode, cuda=cuda, told=told) for mode in modes]
        return Parts(whole, None if told else whole_tails(experiment, cuda=cuda), {}, None)
    lone = {count == 1 for count in ResolvedLayout.of(experiment).layer_counts}
    stages = {
        alone: [sample_stages(experiment, mode, lone=alone, cuda=cuda, told=told) for mode in modes] for alone in lone
    }
    return Parts((), None, stages, None if told else trace_stage_tails(experiment, cuda=cuda))


def extended(experiment: Experiment, pipeline_rank: int, parts: Parts, rehearsal: Rehearsal | None = None) -> Extended:
    """What a step of a rank takes.

    Args:
        experiment: the run, its layout resolved.
        pipeline_rank: its number along pp.
        parts: traced for this layout.
        rehearsal: of this rank's schedule, where it is known.
    """
    pieces = passes_of(experiment, pipeline_rank, parts, rehearsal)
    layout = ResolvedLayout.of(experiment)
    if parts.stage_tails is None:
        assert parts.whole_tails is not None, "one of them is there"
        tail = tail_of(parts.whole_tails, experiment.model.layers)
        sample, batches = parts.whole[0], layout.gradient_accumulation
        base = sample.base - tail_of(parts.whole_tails, LAYERS).kept + tail.kept + batches * sample.batch
        return _put_together(base, pieces, tail)
    stages = stages_of(experiment, pipeline_rank)
    sample = parts.stages[len(stages[0].modes) == 1][0]
    base = base_of(
        sample, parts.stage_tails, stages, layout.pipeline_microbatches, shared=experiment.parallelism.cp > 1
    )
    return _put_together(base, pieces, parts.stage_tails.of(stages))


def passes_of(
    experiment: Experiment, pipeline_rank: int, parts: Parts, rehearsal: Rehearsal | None = None
) -> Sequence[Piece]:
    """The pieces of a rank's step but its end; the arguments are those of `extended`."""
    if experiment.parallelism.pp == 1:
        _, of_block = recomputation(experiment)
        return whole_pieces(parts.whole, of_block, ResolvedLayout.of(experiment).gradient_accumulation)
    rehearsal = rehearsal or rehearsed(experiment, pipeline_rank, parts)
    stages = stages_of(experiment, pipeline_rank)
    by_number = {stage.number: stage for stage in stages}
    of_stage = {stage.number: parts.stages[len(stage.modes) == 1] for stage in stages}
    keys = {(turn.action.stage, turn.action.kind, turn.first) for turn in rehearsal.turns}
    actions = {(at, kind, first): action_piece(of_stage[at], by_number[at], kind, first) for at, kind, first in keys}
    sample = of_stage[stages[0].number][0]
    reduction = [piece for stage in stages for piece in reduction_pieces(of_stage[stage.number][0], stage)]
    return [sample.prologue, played(sample, rehearsal, actions), *reduction]


def rehearsed(experiment: Experiment, pipeline_rank: int, parts: Parts) -> Rehearsal:
    """A rank's schedule, gone through."""
    layout = ResolvedLayout.of(experiment)
    parallelism, placement = experiment.parallelism, layout.stage_placement
    sample = next(iter(parts.stages.values()))[0]
    orders = build_schedule(parallelism.pp_schedule, parallelism.pp, len(placement), layout.pipeline_microbatches)
    return rehearse(orders, placement, pipeline_rank, passes=1, delivered=sample.delivered)


def stages_of(experiment: Experiment, pipeline_rank: int) -> list[StageShape]:
    """The stages of a pipeline rank."""
    layout = ResolvedLayout.of(experiment)
    layers, placement = layout.stage_layers, layout.stage_placement
    _, of_block = recomputation(experiment)
    kinds = [FIRST, *[MIDDLE] * (len(layers) - 2), LAST]
    return [
        StageShape(number, kinds[number], tuple(of_block[layer] for layer in layers[number]))
        for number, rank in enumerate(placement)
        if rank == pipeline_rank
    ]


def _put_together(base: Amounts, pieces: Sequence[Piece], tail: Tail) -> Extended:
    peak, held = _peak(base, pieces)
    assert held.sum() + tail.piece.most.sum() < peak.bytes, "what the optimizer takes for a moment is little"
    return Extended(
        peak,
        _by_category(tail.kept),
        _by_category(held)["gradients"],
        added([*(piece.work for piece in pieces), tail.piece.work]),
    )


def _peak(base: Amounts, pieces: Iterable[Piece]) -> tuple[Moment, Amounts]:
    """The moment at which most is held, the first of equal ones; and what is held at the end."""
    held, most, height, where = base, base, int(base.sum()), "before the step"
    for piece in pieces:
        total = int(held.sum() + piece.most.sum())
        if total > height:
            most, height, where = held + piece.most, total, piece.where
        held = held + piece.net
    return Moment(height, _by_category(most), where), held


def _by_category(held: Amounts) -> dict[str, int]:
    return {name: int(size) for name, size in zip(CATEGORIES, held, strict=True)}
