"""Extrapolated traces: composed from samples of a small model, equal to full traces in every allocation.

Pipeline ranks share the samples, and ranks with equal layer counts share setup and optimizer step.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.cuda.caching_allocator import MIN_BLOCK
from titan_exp.plan.extrapolate.allocation_events import EventComposer
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepTrace, trace_optimizer_step
from titan_exp.plan.extrapolate.sample import Samples, trace_samples
from titan_exp.plan.extrapolate.schedule import (
    ExtrapolationError,
    SampledPart,
    ScheduledAction,
    ScheduleSimulation,
    StageShape,
    microbatch_loop,
    simulate_rank,
    stages_of,
)
from titan_exp.plan.planner_processes import Call
from titan_exp.plan.time.roofline import axis_ranks
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import pipeline_ranks
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.segments import END, NOT_TRACKED, PROLOGUES, RESULT, GradientKey, StepPosition, sum_costs
from titan_exp.plan.trace.trace_step import HostUsage, Trace

MAX_MICRO_BATCHES = 8
"""Maximum number of composed micro-batches without a pipeline; further ones repeat."""


@dataclass
class TraceExtrapolator:
    """Extrapolates the traces of a run's ranks. Samples are traced on first use."""

    experiment: Experiment
    cuda: bool
    matmul_workspace: int = 0
    _optimizer_steps: dict[object, OptimizerStepTrace | Call[OptimizerStepTrace]] = field(default_factory=dict)

    def trace(self, pipeline_rank: int) -> Trace:
        """Trace of a rank's step.

        Raises:
            ExtrapolationError: the samples do not determine the trace.
            UserError: the step calls an unknown operator.
        """
        layout, stages = ResolvedLayout.of(self.experiment), self._stages(pipeline_rank)
        samples, optimizer_step = self.samples, self.optimizer_step(pipeline_rank)
        sample, number = next(iter(samples.values()))[0], layout.gradient_accumulation
        # The first step, which creates the optimizer state, has as few micro-batches as possible.
        if layout.parallelism.pp == 1:
            simulation = microbatch_loop(number, sample.micro_batches)
            composed = microbatch_loop(min(number, MAX_MICRO_BATCHES), sample.micro_batches)
            schedules = [microbatch_loop(1, 1), composed]
        else:
            simulate = partial(simulate_rank, layout, pipeline_rank, sends_complete=sample.sends_complete)
            simulation = simulate()
            schedules = [simulate(passes=1), simulation]
        sizes = {"granularity": MIN_BLOCK if self.cuda else 1, "workspace": self.matmul_workspace}
        tracker, gradients = _compose_rank(samples, stages, schedules, optimizer_step, **sizes)
        costs = sum_costs([_pass_costs(samples, stages, simulation), optimizer_step.costs])
        axes = axis_ranks(layout.parallelism, pipeline_rank, costs)
        saved = tuple(
            dict.fromkeys(line for each in samples.values() for sample in each for line in sample.saved_calls)
        )
        kept = optimizer_step.on_host
        host = None if kept is None else HostUsage(tracker.peak(on_host=True), kept)
        peak, timeline = tracker.peak(), tracker.timeline()
        return Trace(peak, tracker.allocated(), gradients, costs, axes, timeline, *tracker.events(), host, saved)

    def trace_optimizer_steps(
        self,
        pipeline_ranks: Collection[int],
        begin: Callable[[Callable[[], OptimizerStepTrace]], Call[OptimizerStepTrace]],
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
    def samples(self) -> Samples:
        """Samples of the run's stages."""
        return trace_samples(self.experiment, cuda=self.cuda)


def _compose_rank(
    samples: Samples,
    stages: Sequence[StageShape],
    schedules: Sequence[ScheduleSimulation],
    optimizer_step: OptimizerStepTrace,
    *,
    granularity: int,
    workspace: int,
) -> tuple[MemoryTracker, int]:
    """Compose two steps of a rank, each with its schedule; returns their tracker and the bytes of reduced gradients.

    `granularity` and `workspace` are as in `EventComposer`.

    Raises:
        ExtrapolationError: the samples do not determine an event.
    """
    composer, size = EventComposer({stage.number: len(stage.modes) for stage in stages}, granularity, workspace), 0
    rank = _Rank(composer, samples, stages)
    composer.add_setup(optimizer_step)
    for step, schedule in enumerate(schedules):
        if step:
            composer.tracker.begin_step()
        size = rank.step(step, schedule, optimizer_step)
    return composer.tracker, size


class _Rank:
    def __init__(self, composer: EventComposer, samples: Samples, stages: Sequence[StageShape]) -> None:
        self._composer, self._stages = composer, {stage.number: stage for stage in stages}
        self._samples = {stage.number: samples[stage.sample] for stage in stages}
        self._first = self._samples[stages[0].number][0]

    def step(self, step: int, simulation: ScheduleSimulation, optimizer_step: OptimizerStepTrace) -> int:
        composer = self._composer
        composer.replay(self._first, PROLOGUES[step], PROLOGUES[step])
        hidden: dict[int, int] = {}
        during, made, released = False, list[int](), list[int]()
        for event in simulation.events:
            if event.what == "begin":
                during, made, released = True, [], []
                self._act(step, simulation.actions[event.which])
            elif event.what == "end":
                during = False
                for number in made:
                    hidden[number] = self._result(step, simulation.actions[event.which])
                for number in released:
                    composer.release(hidden[number])
            elif during:
                (made if event.what == "allocate" else released).append(event.which)
            elif event.what == "allocate":
                hidden[event.which] = composer.allocate(*self._first.hidden[event.kind])
            else:
                composer.release(hidden[event.which])
        for stage in self._stages.values():
            for part in self._samples[stage.number][0].reduction_parts(stage):
                self._replay(StepPosition(step, stage.number, None, part.part, part.place), part, None)
        gradients = {key: self._gradient(step, key) for key in optimizer_step.gradients[step].values()}
        at = PROLOGUES[step]
        metrics = [composer.locate(self._first, number, at, at) for number in self._first.metrics(step)]
        return composer.add_optimizer_step(optimizer_step, step, gradients, metrics)

    def _act(self, step: int, scheduled: ScheduledAction) -> None:
        number, kind, micro = scheduled.action
        for part in self._samples[number][0].action_parts(self._stages[number], kind):
            self._replay(StepPosition(step, number, micro, part.part, part.place), part, scheduled.sampled)

    def _replay(self, at: StepPosition, part: SampledPart, micro: int | None) -> None:
        source = StepPosition(at.step, part.stage, micro, part.part, part.block)
        # Only actions name the block in their phase.
        layer = None if micro is None or part.place is None else self._stages[at.stage].layers[part.place]
        self._composer.replay(self._samples[at.stage][part.mode], source, at, layer)

    def _result(self, step: int, scheduled: ScheduledAction) -> int:
        """Storage of an action's result."""
        number, kind, micro = scheduled.action
        stage = self._stages[number]
        sample = self._samples[number][stage.last_mode(kind)]
        source = StepPosition(step, stage.sampled, scheduled.sampled, kind + RESULT, None)
        if source not in sample.results:
            raise ExtrapolationError("an action has no result in the sample")
        at = StepPosition(step, number, micro, kind + RESULT, None)
        return self._composer.locate(sample, sample.results[source], source, at)

    def _gradient(self, step: int, key: GradientKey) -> int:
        """Storage of a parameter's reduced gradient."""
        stage = [*self._stages.values()][key.part]
        samples, sampled, block = self._samples[stage.number], stage.sampled, None
        sample = samples[0 if key.block is None else stage.modes[key.block]]
        if key.block is not None:
            sampled, block = sample.block_like(stage, key.block)
        allocation = sample.gradients[step].get(GradientKey(sample.stages.index(sampled), block, key.name), NOT_TRACKED)
        if allocation not in sample.sites:
            raise ExtrapolationError(f"{key.name} has no gradient in the sample")
        source = StepPosition(step, sampled, None, END, block)
        at = StepPosition(step, stage.number, None, END, key.block)
        return self._composer.locate(sample, allocation, source, at)


def _pass_costs(samples: Samples, stages: Sequence[StageShape], simulation: ScheduleSimulation) -> OpCosts:
    """Costs of a rank's step before the optimizer step: prologue, actions and messages, gradient reductions."""
    own, first = {stage.number: stage for stage in stages}, samples[stages[0].sample][0]

    def of_parts(stage: StageShape, parts: Iterable[SampledPart], micro: int | None) -> OpCosts:
        found, at = samples[stage.sample], [(part.mode, _source(part, micro)) for part in parts]
        return sum_costs(segment.costs for mode, source in at for segment in found[mode].segments.get(source, ()))

    prologue = (segment.costs for segment in first.segments[PROLOGUES[1]])
    terms = [sum_costs(prologue), sum_costs([first.message], simulation.sent)]
    actions = Counter((each.action.stage, each.action.kind, each.sampled) for each in simulation.actions)
    for (number, kind, micro), count in actions.items():
        parts = samples[own[number].sample][0].action_parts(own[number], kind)
        terms.append(sum_costs([of_parts(own[number], parts, micro)], count))
    terms += [of_parts(stage, samples[stage.sample][0].reduction_parts(stage), None) for stage in stages]
    return sum_costs(terms)


def _source(part: SampledPart, micro: int | None) -> StepPosition:
    return StepPosition(1, part.stage, micro, part.part, part.block)
