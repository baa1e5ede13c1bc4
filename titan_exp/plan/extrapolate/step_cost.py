"""Extrapolated step totals: peak memory and costs of a rank, equal to those of its full trace."""

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
from titan_exp.plan.trace.segments import CategoryBytes, Segment, sum_costs


@dataclass(frozen=True)
class StepCost:
    """Peak memory and costs of a step."""

    peak: Moment
    """Peak memory."""
    persistent: dict[str, int]
    """Bytes of parameters and optimizer state, by category."""
    gradients: int
    """Bytes of this rank's reduced gradients."""
    costs: OpCosts
    """FLOPs, memory traffic and messages of the step."""


@dataclass(frozen=True)
class TracedParts:
    """Samples shared by runs that differ in layers, schedule and number of micro-batches alone."""

    model_samples: Sequence[ModelSample]
    """Without a pipeline: a sample for each activation checkpointing mode."""
    model_optimizer_steps: tuple[OptimizerStep, OptimizerStep] | None
    """Without a pipeline: with one and with two layers; None where allocation events are recorded."""
    stage_samples: Mapping[bool, Sequence[StageSample]]
    """With a pipeline: likewise, for stages of several blocks (False) and of one (True)."""
    stage_optimizer_steps: StageOptimizerSteps | None
    """With a pipeline; None where allocation events are recorded."""


def trace_parts(experiment: Experiment, *, cuda: bool, record_events: bool = False) -> TracedParts:
    """Trace the samples of a run."""
    modes, _ = recompute_modes(experiment)
    if experiment.parallelism.pp == 1:
        whole = [sample_model(experiment, mode, cuda=cuda, record_events=record_events) for mode in modes]
        return TracedParts(whole, None if record_events else trace_optimizer_steps(experiment, cuda=cuda), {}, None)
    lone = {count == 1 for count in ResolvedLayout.of(experiment).layer_counts}
    stages = {
        alone: [sample_stages(experiment, mode, lone=alone, cuda=cuda, record_events=record_events) for mode in modes]
        for alone in lone
    }
    return TracedParts((), None, stages, None if record_events else trace_stage_optimizer_steps(experiment, cuda=cuda))


def step_cost(
    experiment: Experiment, pipeline_rank: int, parts: TracedParts, simulation: ScheduleSimulation | None = None
) -> StepCost:
    """Peak memory and costs of a rank's step. `simulation` is that of its schedule, if it is known."""
    segments = step_segments(experiment, pipeline_rank, parts, simulation)
    if parts.stage_optimizer_steps is None:
        assert parts.model_optimizer_steps is not None, "one of them is there"
        optimizer_step = extrapolate_optimizer_step(parts.model_optimizer_steps, experiment.model.layers)
        sample, batches = parts.model_samples[0], ResolvedLayout.of(experiment).gradient_accumulation
        base = (
            sample.base
            - extrapolate_optimizer_step(parts.model_optimizer_steps, SAMPLED_LAYERS).persistent
            + optimizer_step.persistent
            + batches * sample.batch
        )
        return _step_cost(base, segments, optimizer_step)
    stages = stages_of(experiment, pipeline_rank)
    sample = parts.stage_samples[len(stages[0].modes) == 1][0]
    base = bytes_before_step(
        sample,
        parts.stage_optimizer_steps,
        stages,
        ResolvedLayout.of(experiment).pipeline_microbatches,
        shared=experiment.parallelism.cp > 1,
    )
    return _step_cost(base, segments, parts.stage_optimizer_steps.of(stages))


def step_segments(
    experiment: Experiment, pipeline_rank: int, parts: TracedParts, simulation: ScheduleSimulation | None = None
) -> Sequence[Segment]:
    """Segments of a rank's step before the optimizer step; arguments as in `step_cost`."""
    if experiment.parallelism.pp == 1:
        _, of_block = recompute_modes(experiment)
        return model_segments(parts.model_samples, of_block, ResolvedLayout.of(experiment).gradient_accumulation)
    simulation = simulation or simulate_rank(experiment, pipeline_rank, parts)
    stages = stages_of(experiment, pipeline_rank)
    by_number = {stage.number: stage for stage in stages}
    of_stage = {stage.number: parts.stage_samples[len(stage.modes) == 1] for stage in stages}
    keys = {(scheduled.action.stage, scheduled.action.kind, scheduled.first) for scheduled in simulation.actions}
    actions = {(at, kind, first): action_segment(of_stage[at], by_number[at], kind, first) for at, kind, first in keys}
    sample = of_stage[stages[0].number][0]
    reduction = [segment for stage in stages for segment in reduction_segments(of_stage[stage.number][0], stage)]
    return [sample.prologue, schedule_segment(sample, simulation, actions), *reduction]


def simulate_rank(experiment: Experiment, pipeline_rank: int, parts: TracedParts) -> ScheduleSimulation:
    """Simulate a rank's schedule."""
    parallelism, layout = experiment.parallelism, ResolvedLayout.of(experiment)
    placement = layout.stage_placement
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


def _step_cost(base: CategoryBytes, segments: Sequence[Segment], optimizer_step: OptimizerStep) -> StepCost:
    peak, held = _peak(base, segments)
    assert held.sum() + optimizer_step.segment.peak.sum() < peak.bytes, "the optimizer step never has the peak"
    return StepCost(
        peak,
        _by_category(optimizer_step.persistent),
        _by_category(held)["gradients"],
        sum_costs([*(segment.costs for segment in segments), optimizer_step.segment.costs]),
    )


def _peak(base: CategoryBytes, segments: Iterable[Segment]) -> tuple[Moment, CategoryBytes]:
    """The first moment with the most allocated memory, and bytes allocated at the end."""
    held, peak, height, where = base, base, int(base.sum()), "before the step"
    for segment in segments:
        total = int(held.sum() + segment.peak.sum())
        if total > height:
            peak, height, where = held + segment.peak, total, segment.where
        held = held + segment.net
    return Moment(height, _by_category(peak), where), held


def _by_category(held: CategoryBytes) -> dict[str, int]:
    return {name: int(size) for name, size in zip(CATEGORIES, held, strict=True)}
