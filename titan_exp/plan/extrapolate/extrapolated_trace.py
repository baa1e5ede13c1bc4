"""Extrapolated traces: composed from samples of a small model, equal to full traces in every allocation.

Pipeline ranks share the samples, and ranks with as many layers share setup and optimizer step.
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
from titan_exp.plan.extrapolate.step_cost import TracedParts, simulate_rank, stages_of, step_segments, trace_parts
from titan_exp.plan.search.layout_cost import axes_of
from titan_exp.plan.trace.fake_world import pipeline_ranks
from titan_exp.plan.trace.segments import sum_costs
from titan_exp.plan.trace.trace_step import Trace

MAX_MICRO_BATCHES = 8
"""Composed micro-batches, at most: those in between repeat."""


@dataclass
class TraceExtrapolator:
    """Extrapolates the traces of one run's ranks. Samples are traced when they are first needed."""

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _parts: TracedParts | None = None
    _model_events: list[SampleEvents] = field(default_factory=list)
    _stage_events: Mapping[bool, StageEvents] = field(default_factory=dict)
    _optimizer_steps: dict[object, OptimizerStepEvents] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """Trace of a rank's step.

        Raises:
            ExtrapolationError: the samples do not determine it.
            UserError: the step calls an unknown operator.
        """
        parts, optimizer_step, simulation = self._traced(), self.optimizer_step(pipeline_rank), None
        if self.experiment.parallelism.pp > 1:
            simulation = simulate_rank(self.experiment, pipeline_rank, parts)
        composer, gradients = self._compose(pipeline_rank, optimizer_step, simulation)
        tracker, before, step = composer.result()
        passes = step_segments(self.experiment, pipeline_rank, parts, simulation)
        costs = sum_costs([*(segment.costs for segment in passes), optimizer_step.costs])
        axes = axes_of(self.experiment, pipeline_rank, costs)
        return Trace(tracker.peak(), tracker.allocated(), gradients, costs, axes, tracker.timeline(), before, step)

    def optimizer_step(self, pipeline_rank: int) -> OptimizerStepEvents:
        """Setup and optimizer steps of a rank with as many layers."""
        stages, layers = stages_of(self.experiment, pipeline_rank), ResolvedLayout.of(self.experiment).stage_layers
        shape = tuple((stage.kind, len(stage.modes)) for stage in stages)
        if shape not in self._optimizer_steps:
            rank = pipeline_ranks(self.experiment)[pipeline_rank]
            own = [layer for stage in stages for layer in layers[stage.number]]
            self._optimizer_steps[shape] = trace_optimizer_step_events(self.experiment, rank, own, cuda=self.cuda)
        return self._optimizer_steps[shape]

    def _traced(self) -> TracedParts:
        if self._parts is None:
            parts = self._parts = trace_parts(self.experiment, cuda=self.cuda, record_events=True)
            self._model_events = [model_events(sample) for sample in parts.model_samples]
            self._stage_events = {alone: stage_events(samples) for alone, samples in parts.stage_samples.items()}
        return self._parts

    def _compose(
        self, pipeline_rank: int, optimizer_step: OptimizerStepEvents, simulation: ScheduleSimulation | None
    ) -> tuple[EventComposer, int]:
        if simulation is not None:
            stages, layers = stages_of(self.experiment, pipeline_rank), ResolvedLayout.of(self.experiment).stage_layers
            return compose_stages(
                self._stage_events, stages, layers, simulation, optimizer_step, workspace=self.matmul_workspace
            )
        _, modes = recompute_modes(self.experiment)
        number, own = (
            ResolvedLayout.of(self.experiment).gradient_accumulation,
            self._traced().model_samples[0].batch_tensors,
        )
        micro_batches, batches = min(number, MAX_MICRO_BATCHES), (number - 1) * own
        return compose_no_pipeline(
            self._model_events, modes, micro_batches, optimizer_step, batches=batches, workspace=self.matmul_workspace
        )
