"""Allocation events of a rank's step, composed along its schedule from the events of sampled blocks.

Without a pipeline, the schedule is the loop over micro-batches on one stage.
"""

from collections.abc import Sequence

from titan_exp.plan.extrapolate.allocation_events import EventComposer
from titan_exp.plan.extrapolate.optimizer_step import OptimizerStepTrace
from titan_exp.plan.extrapolate.sample import Samples
from titan_exp.plan.extrapolate.schedule_simulation import ScheduledAction, ScheduleSimulation
from titan_exp.plan.extrapolate.stages import ExtrapolationError, SampledPart, StageShape
from titan_exp.plan.trace.memory_tracker import MemoryTracker
from titan_exp.plan.trace.segments import NOT_TRACKED, GradientKey
from titan_exp.plan.trace.step_position import END, PROLOGUES, RESULT, StepPosition


def compose_rank(
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
        sample = self._samples[number][stage.mode(-1)]
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
