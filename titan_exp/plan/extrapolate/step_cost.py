"""Extrapolated step totals: peak memory and costs of a rank, identical to its full trace.

Segments of the samples are summed along the rank's schedule.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.eligibility import recompute_modes
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepsByStage, trace_optimizer_steps
from titan_exp.plan.extrapolate.sample import Sample, take_sample
from titan_exp.plan.extrapolate.sample_key import SampleKey, sample_keys
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation, microbatch_loop, simulate_schedule
from titan_exp.plan.extrapolate.stages import SampledPart, StageShape
from titan_exp.plan.time.roofline import schedule_and_bubble
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.memory_tracker import CATEGORIES, Moment
from titan_exp.plan.trace.segments import CategoryBytes, Segment, Totals, category_bytes, join_segments, sum_costs
from titan_exp.plan.trace.step_position import PROLOGUES, TIED_SUM, StepPosition

Samples = Mapping[SampleKey, Sequence[Sample]]
"""One sample per activation checkpointing mode, for stages of each key."""


@dataclass(frozen=True)
class StepCost:
    """Peak memory and costs of a step."""

    peak: Moment
    """Peak memory."""
    persistent: dict[str, int]
    """Bytes of parameters and optimizer state, by category."""
    costs: OpCosts
    """FLOPs, memory traffic and messages of the step."""


@dataclass(frozen=True)
class TracedParts:
    """Traces shared by runs that differ only in layers, schedule and number of micro-batches."""

    samples: Samples
    """Samples of forward and backward."""
    optimizer_steps: OptimizerStepsByStage
    """Optimizer steps by stage."""


def trace_parts(experiment: Experiment, *, cuda: bool) -> TracedParts:
    """Trace the samples and optimizer steps of a run."""
    return TracedParts(trace_samples(experiment, cuda=cuda), trace_optimizer_steps(experiment, cuda=cuda))


def trace_samples(experiment: Experiment, *, cuda: bool, record_events: bool = False) -> Samples:
    """Trace the samples of a run."""
    modes, _ = recompute_modes(experiment.activation_checkpoint, experiment.model.layers)
    return {
        key: [take_sample(experiment, mode, key, cuda=cuda, record_events=record_events) for mode in modes]
        for key in dict.fromkeys(sample_keys(experiment))
    }


def step_cost(
    layout: ResolvedLayout, stages: Sequence[StageShape], parts: TracedParts, simulation: ScheduleSimulation
) -> StepCost:
    """Peak memory and costs of a rank's step, from its stages and schedule."""
    passes, blocks = sum_passes(parts.samples, stages, simulation), Counter[str]()
    sample, steps = parts.samples[stages[0].sample][0], parts.optimizer_steps
    for stage in stages:
        blocks[stage.kind] += len(stage.modes) - sample.last_of(stage.sampled)
    optimizer_step = steps.of(blocks, layout.layers - steps.last)
    of_sample = steps.of(sample.layers_alike, sample.model_layers)
    kept = optimizer_step.persistent - of_sample.persistent + optimizer_step.other - of_sample.other
    base = sample.base + kept + len(stages) * sample.buffers + layout.gradient_accumulation * sample.batch
    held = base + passes.net
    moments = [(base + passes.peak, passes.where), (held + optimizer_step.tied, TIED_SUM)]
    moments.append((held + optimizer_step.peak, optimizer_step.where))
    peak, where = max(moments, key=lambda moment: moment[0].sum())
    return StepCost(
        Moment(int(peak.sum()), _by_category(peak), where),
        _by_category(optimizer_step.persistent),
        sum_costs([passes.costs, optimizer_step.costs]),
    )


def sum_passes(samples: Samples, stages: Sequence[StageShape], simulation: ScheduleSimulation) -> Totals:
    """Totals of a rank's step before the optimizer step: prologue, all actions, gradient reductions."""
    own = {stage.number: stage for stage in stages}
    of_stage = {stage.number: samples[stage.sample] for stage in stages}
    keys = {(scheduled.action.stage, scheduled.action.kind, scheduled.sampled) for scheduled in simulation.actions}
    actions = {key: _action_totals(of_stage[key[0]], own[key[0]], *key[1:]) for key in keys}
    sample = of_stage[stages[0].number][0]
    reductions = [
        segment
        for stage in stages
        for part in of_stage[stage.number][0].reduction_parts(stage)
        for segment in _segments(of_stage[stage.number], part, None)
    ]
    prologue = sample.segments[PROLOGUES[1]]
    return join_segments([*prologue, _schedule_totals(sample, simulation, actions), *reductions])


def simulate_rank(
    layout: ResolvedLayout, pipeline_rank: int, samples: Samples, passes: int | None = None
) -> ScheduleSimulation:
    """Simulate a rank's schedule; `passes` through the pipeline are by default those of a step."""
    parallelism, sample = layout.parallelism, next(iter(samples.values()))[0]
    if parallelism.pp == 1:
        return microbatch_loop(layout.gradient_accumulation, sample.micro_batches)
    schedule = parallelism.pp_schedule, parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    passes = passes or layout.gradient_accumulation // layout.pipeline_microbatches
    return _simulate(
        schedule,
        tuple(layout.stage_placement),
        pipeline_rank,
        passes,
        sends_complete=sample.sends_complete,
        resharded=layout.reshard_policy != "never",
    )


@cache
def _simulate(
    schedule: tuple[str, int, int, int],
    placement: Sequence[int],
    rank: int,
    passes: int,
    *,
    sends_complete: bool,
    resharded: bool,
) -> ScheduleSimulation:
    orders, _ = schedule_and_bubble(*schedule)
    return simulate_schedule(orders, placement, rank, passes, sends_complete, resharded=resharded)


def _segments(samples: Sequence[Sample], part: SampledPart, micro: int | None) -> Sequence[Segment]:
    return samples[part.mode].segments.get(StepPosition(1, part.stage, micro, part.part, part.block), ())


def _action_totals(samples: Sequence[Sample], stage: StageShape, kind: str, micro: int) -> Totals:
    """Totals of a stage's action, without hidden states passed between stages."""
    parts = samples[0].action_parts(stage, kind)
    whole = join_segments([segment for part in parts for segment in _segments(samples, part, micro)])
    return replace(whole, net=whole.net - samples[0].handed_over[stage.sampled, kind, micro])


def _schedule_totals(
    sample: Sample, simulation: ScheduleSimulation, actions: dict[tuple[int, str, int], Totals]
) -> Totals:
    """Totals of all actions of a step and the messages between them."""
    sizes = np.stack(sample.hidden)
    keys = [(scheduled.action.stage, scheduled.action.kind, scheduled.sampled) for scheduled in simulation.actions]
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
    counts = np.bincount(which, minlength=len(names))
    costs = [sum_costs([actions[name].costs], int(count)) for name, count in zip(names, counts, strict=True)]
    messages = sum_costs([sample.message], simulation.sent)
    peak = moments[at] if totals[at] > 0 else category_bytes({})
    return Totals(ends[-1], peak, actions[keys[at // 2]].where, sum_costs([*costs, messages]))


def _by_category(held: CategoryBytes) -> dict[str, int]:
    return {name: int(size) for name, size in zip(CATEGORIES, held, strict=True)}
