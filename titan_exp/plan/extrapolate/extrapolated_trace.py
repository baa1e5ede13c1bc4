"""Ranks' traces, put together from those of small runs: equal to traces of the whole, allocations included.

Pipeline ranks share the small runs, and those with as many layers the build and the end of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.allocation_events import EventComposer, OptimizerStepEvents, SampleEvents
from titan_exp.plan.extrapolate.eligibility import recompute_modes
from titan_exp.plan.extrapolate.events_no_pipeline import compose_no_pipeline, model_events
from titan_exp.plan.extrapolate.events_pipeline import StageEvents, compose_stages, stage_events
from titan_exp.plan.extrapolate.optimizer_step import trace_optimizer_step_events
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation
from titan_exp.plan.extrapolate.segments import sum_costs
from titan_exp.plan.extrapolate.step_cost import TracedParts, simulate_rank, stages_of, step_segments, trace_parts
from titan_exp.plan.search.layout_cost import axes_of
from titan_exp.plan.trace.fake_world import pipeline_ranks
from titan_exp.plan.trace.trace_step import Trace

MOST_TOLD = 8
"""Micro-batches that are told one after the other: each in between finds what the one before it found."""


@dataclass
class TraceExtrapolator:
    """Puts traces of one run's ranks together; what they share is traced when it is first needed.

    Args:
        experiment: the run, its layout resolved, of which `shortcut.unsupported_reason` is None.
        cuda: as of `trace_step`.
        matmul_workspace: bytes that the library of matmuls keeps for each thread that calls it.
    """

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _parts: TracedParts | None = None
    _whole: list[SampleEvents] = field(default_factory=list)
    _stages: Mapping[bool, StageEvents] = field(default_factory=dict)
    _tails: dict[object, OptimizerStepEvents] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """The trace of a rank's step.

        Raises:
            Unwoven: it cannot be put together.
            UserError: the step calls an operator that the planner does not know.
        """
        parts, tail, rehearsal = self._traced(), self.tail(pipeline_rank), None
        if self.experiment.parallelism.pp > 1:
            rehearsal = simulate_rank(self.experiment, pipeline_rank, parts)
        weaver, gradients = self._woven(pipeline_rank, tail, rehearsal)
        ledger, before, step = weaver.told()
        passes = step_segments(self.experiment, pipeline_rank, parts, rehearsal)
        work = sum_costs([*(piece.costs for piece in passes), tail.costs])
        axes = axes_of(self.experiment, pipeline_rank, work)
        return Trace(ledger.peak(), ledger.held(), gradients, work, axes, ledger.timeline(), before, step)

    def tail(self, pipeline_rank: int) -> OptimizerStepEvents:
        """Build and ends of the steps of a rank with as many layers."""
        stages, layers = stages_of(self.experiment, pipeline_rank), ResolvedLayout.of(self.experiment).stage_layers
        shape = tuple((stage.kind, len(stage.modes)) for stage in stages)
        if shape not in self._tails:
            rank = pipeline_ranks(self.experiment)[pipeline_rank]
            own = [layer for stage in stages for layer in layers[stage.number]]
            self._tails[shape] = trace_optimizer_step_events(self.experiment, rank, own, cuda=self.cuda)
        return self._tails[shape]

    def _traced(self) -> TracedParts:
        if self._parts is None:
            parts = self._parts = trace_parts(self.experiment, cuda=self.cuda, told=True)
            self._whole = [model_events(sample) for sample in parts.model_samples]
            self._stages = {alone: stage_events(samples) for alone, samples in parts.stage_samples.items()}
        return self._parts

    def _woven(
        self, pipeline_rank: int, tail: OptimizerStepEvents, rehearsal: ScheduleSimulation | None
    ) -> tuple[EventComposer, int]:
        layout = ResolvedLayout.of(self.experiment)
        if rehearsal is not None:
            stages, layers = stages_of(self.experiment, pipeline_rank), layout.stage_layers
            return compose_stages(self._stages, stages, layers, rehearsal, tail, workspace=self.matmul_workspace)
        _, modes = recompute_modes(self.experiment)
        number, own = layout.gradient_accumulation, self._traced().model_samples[0].looked_at
        micro_batches, batches = min(number, MOST_TOLD), (number - 1) * own
        return compose_no_pipeline(
            self._whole, modes, micro_batches, tail, batches=batches, workspace=self.matmul_workspace
        )
