"""Extrapolated traces: composed from samples of a small model, equal to full traces in every allocation.

Pipeline ranks share the samples, and ranks with equal layer counts share setup and optimizer step.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepTrace, trace_optimizer_step
from titan_exp.plan.extrapolate.rank_events import compose_rank
from titan_exp.plan.extrapolate.schedule_simulation import microbatch_loop
from titan_exp.plan.extrapolate.stages import StageShape, stages_of
from titan_exp.plan.extrapolate.step_cost import Samples, simulate_rank, sum_passes, trace_samples
from titan_exp.plan.time.roofline import axis_ranks
from titan_exp.plan.trace.fake_world import pipeline_ranks
from titan_exp.plan.trace.segments import sum_costs
from titan_exp.plan.trace.trace_step import HostUsage, Trace

MAX_MICRO_BATCHES = 8
"""Maximum number of composed micro-batches without a pipeline; further ones repeat."""


class TracedLater(Protocol):
    """Optimizer step that is traced beside the samples."""

    def result(self) -> OptimizerStepTrace:
        """The trace."""
        ...


@dataclass
class TraceExtrapolator:
    """Extrapolates the traces of a run's ranks. Samples are traced on first use."""

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _optimizer_steps: dict[object, OptimizerStepTrace | TracedLater] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """Trace of a rank's step.

        Raises:
            ExtrapolationError: the samples do not determine the trace.
            UserError: the step calls an unknown operator.
        """
        layout, stages = ResolvedLayout.of(self.experiment), self._stages(pipeline_rank)
        samples, optimizer_step = self._samples, self.optimizer_step(pipeline_rank)
        simulation = simulate_rank(layout, pipeline_rank, samples)
        # The first step, which creates the optimizer state, has as few micro-batches as possible.
        schedules = [simulate_rank(layout, pipeline_rank, samples, passes=1), simulation]
        if layout.parallelism.pp == 1:
            sample, number = next(iter(samples.values()))[0], layout.gradient_accumulation
            composed = microbatch_loop(min(number, MAX_MICRO_BATCHES), sample.micro_batches)
            schedules = [microbatch_loop(1, 1), composed]
        tracker, gradients = compose_rank(samples, stages, schedules, optimizer_step, workspace=self.matmul_workspace)
        costs = sum_costs([sum_passes(samples, stages, simulation).costs, optimizer_step.totals.costs])
        axes = axis_ranks(layout.parallelism, pipeline_rank, costs)
        saved = tuple(
            dict.fromkeys(line for each in samples.values() for sample in each for line in sample.saved_calls)
        )
        kept = optimizer_step.on_host
        host = None if kept is None else HostUsage(tracker.peak(on_host=True), kept)
        peak, timeline = tracker.peak(), tracker.timeline()
        return Trace(peak, tracker.allocated(), gradients, costs, axes, timeline, *tracker.events(), host, saved)

    def trace_optimizer_steps(
        self, pipeline_ranks: Collection[int], begin: Callable[[Callable[[], OptimizerStepTrace]], TracedLater]
    ) -> None:
        """Begin to trace the optimizer steps of several ranks by `begin`, if there are several."""
        calls = {self._shape(rank): self._tracing(rank) for rank in pipeline_ranks}
        if len(calls) > 1:
            self._optimizer_steps |= {shape: begin(call) for shape, call in calls.items()}

    def optimizer_step(self, pipeline_rank: int) -> OptimizerStepTrace:
        """Setup and optimizer steps, shared by ranks with equal layer counts."""
        shape = self._shape(pipeline_rank)
        found = self._optimizer_steps.get(shape)
        if not isinstance(found, OptimizerStepTrace):
            found = self._tracing(pipeline_rank)() if found is None else found.result()
            self._optimizer_steps[shape] = found
        return found

    def _shape(self, pipeline_rank: int) -> object:
        return tuple((stage.kind, len(stage.modes)) for stage in self._stages(pipeline_rank))

    def _tracing(self, pipeline_rank: int) -> Callable[[], OptimizerStepTrace]:
        rank = pipeline_ranks(ResolvedLayout.of(self.experiment))[pipeline_rank]
        return partial(trace_optimizer_step, self.experiment, rank, cuda=self.cuda)

    def _stages(self, pipeline_rank: int) -> list[StageShape]:
        return stages_of(self.experiment, pipeline_rank)

    @cached_property
    def _samples(self) -> Samples:
        return trace_samples(self.experiment, cuda=self.cuda, record_events=True)
