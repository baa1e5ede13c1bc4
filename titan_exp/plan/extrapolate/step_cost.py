"""A rank's step from those of small runs: identical layers and micro-batches are traced once.

What comes out equals the trace of the whole. Where that is not known to be so, there is no shortcut, and
`alike.unsupported_reason` says why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.extrapolate.eligibility import SAMPLED_LAYERS, recompute_modes
from titan_exp.plan.extrapolate.layers_and_microbatches import (
    ModelSample,
    extrapolate_optimizer_step,
    model_segments,
    sample_model,
    trace_optimizer_steps,
)
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStep
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation, simulate_schedule
from titan_exp.plan.extrapolate.segments import CategoryBytes, Segment, sum_costs
from titan_exp.plan.extrapolate.stage_sample import FIRST, LAST, MIDDLE, StageSample, sample_stages
from titan_exp.plan.extrapolate.stages import (
    StageOptimizerSteps,
    StageShape,
    action_segment,
    bytes_before_step,
    reduction_segments,
    schedule_segment,
    trace_stage_optimizer_steps,
)
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, Moment


@dataclass(frozen=True)
class StepCost:
    """What a step takes, as its trace would tell."""

    peak: Moment
    """When most memory is held."""
    persistent: dict[str, int]
    """Parameters and the optimizer's state, bytes held between steps."""
    gradients: int
    """Bytes of this rank's reduced gradients, as the optimizer takes them."""
    costs: OpCosts
    """Operations, bytes and messages of the step."""


@dataclass(frozen=True)
class TracedParts:
    """What steps are put together from that differ in layers, schedule and number of micro-batches alone."""

    model_samples: Sequence[ModelSample]
    """Without a pipeline: a sample for each way of recomputation."""
    model_optimizer_steps: tuple[OptimizerStep, OptimizerStep] | None
    """Likewise; None where births and deaths are told, whose ends are those of a rank with all layers."""
    stage_samples: Mapping[bool, Sequence[StageSample]]
    """With one: samples likewise, for stages of several blocks and for those of one."""
    stage_optimizer_steps: StageOptimizerSteps | None
    """Likewise."""


def trace_parts(experiment: Experiment, *, cuda: bool, told: bool = False) -> TracedParts:
    """Trace what the steps of a run, its layout resolved, are put together from.

    Args:
        experiment: the run.
        cuda: as of `trace_step`.
        told: whether births and deaths of storages are wanted too.
    """
    modes, _ = recompute_modes(experiment)
    if experiment.parallelism.pp == 1:
        whole = [sample_model(experiment, mode, cuda=cuda, told=told) for mode in modes]
        return TracedParts(whole, None if told else trace_optimizer_steps(experiment, cuda=cuda), {}, None)
    lone = {count == 1 for count in ResolvedLayout.of(experiment).layer_counts}
    stages = {
        alone: [sample_stages(experiment, mode, lone=alone, cuda=cuda, told=told) for mode in modes] for alone in lone
    }
    return TracedParts((), None, stages, None if told else trace_stage_optimizer_steps(experiment, cuda=cuda))


def step_cost(
    experiment: Experiment, pipeline_rank: int, parts: TracedParts, rehearsal: ScheduleSimulation | None = None
) -> StepCost:
    """What a step of a rank takes.

    Args:
        experiment: the run, its layout resolved.
        pipeline_rank: its number along pp.
        parts: traced for this layout.
        rehearsal: of this rank's schedule, where it is known.
    """
    pieces = step_segments(experiment, pipeline_rank, parts, rehearsal)
    layout = ResolvedLayout.of(experiment)
    if parts.stage_optimizer_steps is None:
        assert parts.model_optimizer_steps is not None, "one of them is there"
        tail = extrapolate_optimizer_step(parts.model_optimizer_steps, experiment.model.layers)
        sample, batches = parts.model_samples[0], layout.gradient_accumulation
        base = (
            sample.base
            - extrapolate_optimizer_step(parts.model_optimizer_steps, SAMPLED_LAYERS).persistent
            + tail.persistent
            + batches * sample.batch
        )
        return _put_together(base, pieces, tail)
    stages = stages_of(experiment, pipeline_rank)
    sample = parts.stage_samples[len(stages[0].modes) == 1][0]
    base = bytes_before_step(
        sample,
        parts.stage_optimizer_steps,
        stages,
        layout.pipeline_microbatches,
        shared=experiment.parallelism.cp > 1,
    )
    return _put_together(base, pieces, parts.stage_optimizer_steps.of(stages))


def step_segments(
    experiment: Experiment, pipeline_rank: int, parts: TracedParts, rehearsal: ScheduleSimulation | None = None
) -> Sequence[Segment]:
    """The pieces of a rank's step but its end; the arguments are those of `step_cost`."""
    if experiment.parallelism.pp == 1:
        _, of_block = recompute_modes(experiment)
        return model_segments(parts.model_samples, of_block, ResolvedLayout.of(experiment).gradient_accumulation)
    rehearsal = rehearsal or simulate_rank(experiment, pipeline_rank, parts)
    stages = stages_of(experiment, pipeline_rank)
    by_number = {stage.number: stage for stage in stages}
    of_stage = {stage.number: parts.stage_samples[len(stage.modes) == 1] for stage in stages}
    keys = {(turn.action.stage, turn.action.kind, turn.first) for turn in rehearsal.turns}
    actions = {(at, kind, first): action_segment(of_stage[at], by_number[at], kind, first) for at, kind, first in keys}
    sample = of_stage[stages[0].number][0]
    reduction = [piece for stage in stages for piece in reduction_segments(of_stage[stage.number][0], stage)]
    return [sample.prologue, schedule_segment(sample, rehearsal, actions), *reduction]


def simulate_rank(experiment: Experiment, pipeline_rank: int, parts: TracedParts) -> ScheduleSimulation:
    """A rank's schedule, gone through."""
    layout = ResolvedLayout.of(experiment)
    parallelism, placement = experiment.parallelism, layout.stage_placement
    sample = next(iter(parts.stage_samples.values()))[0]
    orders = build_schedule(parallelism.pp_schedule, parallelism.pp, len(placement), layout.pipeline_microbatches)
    return simulate_schedule(orders, placement, pipeline_rank, passes=1, sends_complete=sample.sends_complete)


def stages_of(experiment: Experiment, pipeline_rank: int) -> list[StageShape]:
    """The stages of a pipeline rank."""
    layout = ResolvedLayout.of(experiment)
    layers, placement = layout.stage_layers, layout.stage_placement
    _, of_block = recompute_modes(experiment)
    kinds = [FIRST, *[MIDDLE] * (len(layers) - 2), LAST]
    return [
        StageShape(number, kinds[number], tuple(of_block[layer] for layer in layers[number]))
        for number, rank in enumerate(placement)
        if rank == pipeline_rank
    ]


def _put_together(base: CategoryBytes, pieces: Sequence[Segment], tail: OptimizerStep) -> StepCost:
    peak, held = _peak(base, pieces)
    assert held.sum() + tail.piece.peak.sum() < peak.bytes, "what the optimizer takes for a moment is little"
    return StepCost(
        peak,
        _by_category(tail.persistent),
        _by_category(held)["gradients"],
        sum_costs([*(piece.costs for piece in pieces), tail.piece.costs]),
    )


def _peak(base: CategoryBytes, pieces: Iterable[Segment]) -> tuple[Moment, CategoryBytes]:
    """The moment at which most is held, the first of equal ones; and what is held at the end."""
    held, most, height, where = base, base, int(base.sum()), "before the step"
    for piece in pieces:
        total = int(held.sum() + piece.peak.sum())
        if total > height:
            most, height, where = held + piece.peak, total, piece.where
        held = held + piece.net
    return Moment(height, _by_category(most), where), held


def _by_category(held: CategoryBytes) -> dict[str, int]:
    return {name: int(size) for name, size in zip(CATEGORIES, held, strict=True)}
