"""Allocation events of a pipeline rank's step, from the sampled rank's along its simulated schedule."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_exp.plan.extrapolate.allocation_events import (
    NOWHERE,
    EventComposer,
    ExtrapolationError,
    OptimizerStepEvents,
    SampleEvents,
    StepPosition,
)
from titan_exp.plan.extrapolate.events_no_pipeline import (
    END,
    PROLOGUE,
    find_loss,
    gradient_allocation,
    split_layer_number,
    with_layer_numbers,
)
from titan_exp.plan.extrapolate.schedule_simulation import ScheduledAction, ScheduleSimulation
from titan_exp.plan.extrapolate.stage_sample import (
    FIRST,
    LAST,
    MIDDLE,
    StageSample,
)
from titan_exp.plan.extrapolate.stages import StageShape
from titan_exp.plan.trace.memory_tracker import CATEGORIES
from titan_exp.plan.trace.segments import (
    ACTION,
    BETWEEN_ACTIONS,
    GROUP,
    NOT_TRACKED,
    OPTIMIZER_STEP,
    REDUCE,
    EventSegment,
)

SAMPLED_STAGES = {FIRST: 0, MIDDLE: 1, LAST: 3}
"""Stage numbers of the sampled rank, by kind."""
RESULT = " result"


@dataclass(frozen=True)
class StageEvents:
    """Events of sampled stages, with several blocks or with one."""

    by_mode: Sequence[SampleEvents]
    """One sample for each activation checkpointing mode."""
    hidden: Sequence[tuple[int, str]]
    """Bytes and category of hidden states, by kind as in a simulation."""


def stage_events(samples: Sequence[StageSample]) -> StageEvents:
    """Assign the events of samples that differ in activation checkpointing alone to positions."""
    hidden = [(int(size.sum()), CATEGORIES[int(size.argmax())]) for size in samples[0].sizes]
    return StageEvents([_assign_positions(sample) for sample in samples], hidden)


def compose_stages(
    samples: Mapping[bool, StageEvents],
    stages: Sequence[StageShape],
    layers: Sequence[Sequence[int]],
    simulation: ScheduleSimulation,
    optimizer_step: OptimizerStepEvents,
    *,
    workspace: int,
) -> tuple[EventComposer, int]:
    """Compose two steps of a rank; returns them, and the bytes of reduced gradients.

    Args:
        samples: with several blocks per stage (False), and with one (True).
        stages: of the rank.
        layers: numbers of every stage's layers.
        simulation: of the rank's schedule.
        optimizer_step: of a rank with these stages.
        workspace: as in `EventComposer`.

    Raises:
        ExtrapolationError: the samples do not determine an event.
    """
    composer, size = EventComposer({stage.number: len(stage.modes) for stage in stages}, workspace), 0
    rank = _Rank(composer, samples, stages, layers)
    composer.add_setup(optimizer_step)
    for step in (0, 1):
        if step:
            composer.begin_step()
        size = rank.step(step, simulation, optimizer_step)
    return composer, size


class _Rank:
    def __init__(
        self,
        composer: EventComposer,
        samples: Mapping[bool, StageEvents],
        stages: Sequence[StageShape],
        layers: Sequence[Sequence[int]],
    ) -> None:
        self._composer, self._stages, self._layers = composer, {stage.number: stage for stage in stages}, layers
        self._samples = {stage.number: samples[len(stage.modes) == 1] for stage in stages}

    def step(self, step: int, simulation: ScheduleSimulation, optimizer_step: OptimizerStepEvents) -> int:
        composer, events = self._composer, next(iter(self._samples.values()))
        opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
        composer.replay(events.by_mode[0], opening, opening)
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
                hidden[event.which] = composer.allocate(*events.hidden[event.kind])
            else:
                composer.release(hidden[event.which])
        for number in self._stages:
            self._reduce(step, number)
        own = (layer for number in self._stages for layer in self._layers[number])
        layers = dict(zip(optimizer_step.layers, own, strict=True))
        gradients = {
            name: self._gradient(step, with_layer_numbers(name, layers))
            for name in optimizer_step.gradients[step].values()
        }
        return composer.add_optimizer_step(
            optimizer_step, step, gradients, find_loss(composer, events.by_mode[0], step)
        )

    def _act(self, step: int, scheduled: ScheduledAction) -> None:
        number, kind, micro = scheduled.action
        stage, samples = self._stages[number], self._samples[number].by_mode
        own, there, modes = SAMPLED_STAGES[stage.kind], 0 if scheduled.first else 1, stage.modes
        places = list(range(len(modes)))
        if kind != "F":
            places.reverse()
        source, at = (
            StepPosition(step, own, there, f"{kind} before", None),
            StepPosition(step, number, micro, f"{kind} before", None),
        )
        self._composer.replay(samples[modes[places[0]]], source, at)
        for place in places:
            sample, part = samples[modes[place]], f"{kind} block"
            like, block = self._sampled_block(sample, stage, place)
            self._composer.replay(
                sample,
                source._replace(stage=like, part=part, block=block),
                at._replace(part=part, block=place),
                self._layers[number][place],
            )
        part = f"{kind} after"
        self._composer.replay(samples[modes[places[-1]]], source._replace(part=part), at._replace(part=part))

    def _result(self, step: int, scheduled: ScheduledAction) -> int:
        """The storage of an action's result."""
        number, kind, micro = scheduled.action
        stage = self._stages[number]
        sample = self._samples[number].by_mode[stage.modes[-1]]
        source = StepPosition(step, SAMPLED_STAGES[stage.kind], 0 if scheduled.first else 1, kind + RESULT, None)
        if source not in sample.results:
            raise ExtrapolationError("an action has no result in the sample")
        return self._composer.locate(
            sample, sample.results[source], source, StepPosition(step, number, micro, kind + RESULT, None)
        )

    def _reduce(self, step: int, number: int) -> None:
        stage, sample = self._stages[number], self._samples[number].by_mode[0]
        own = StepPosition(step, SAMPLED_STAGES[stage.kind], None, "reduce", None)
        at = own._replace(stage=number)
        self._composer.replay(sample, own, at)
        if own._replace(part=GROUP, block=-1) in sample.event_segments:
            self._composer.replay(sample, own._replace(part=GROUP, block=-1), at._replace(part=GROUP, block=-1))
        if own._replace(part=GROUP, block=0) in sample.event_segments:
            for place in range(len(stage.modes)):
                source, block = self._sampled_block(sample, stage, place)
                there = StepPosition(step, source, None, GROUP, block)
                self._composer.replay(sample, there, at._replace(part=GROUP, block=place))
        self._composer.replay(sample, own._replace(part="rest"), at._replace(part="rest"))

    def _gradient(self, step: int, name: str) -> int:
        layer, pattern = split_layer_number(name)
        if layer is None:
            kinds = [stage for stage in self._stages.values() if stage.kind in (FIRST, LAST)]
            found = [stage for stage in kinds if name in self._samples[stage.number].by_mode[0].gradients[step]]
            # Parameters outside of blocks belong to one end alone.
            for stage in found:
                sample, own = self._samples[stage.number].by_mode[0], SAMPLED_STAGES[stage.kind]
                allocation = gradient_allocation(sample, step, name)
                if sample.sites[allocation].position.stage == own:
                    there = StepPosition(step, own, None, END, None)
                    return self._composer.locate(sample, allocation, there, there._replace(stage=stage.number))
            raise ExtrapolationError(f"{name} has no gradient in the sample")
        number = next(number for number, layers in enumerate(self._layers) if layer in layers)
        stage, place = self._stages[number], self._layers[number].index(layer)
        sample = self._samples[number].by_mode[stage.modes[place]]
        source, block = self._sampled_block(sample, stage, place)
        allocation = gradient_allocation(sample, step, pattern.format(_layer_of(sample, source, block)))
        there = StepPosition(step, source, None, END, block)
        return self._composer.locate(sample, allocation, there, StepPosition(step, number, None, END, place))

    @staticmethod
    def _sampled_block(sample: SampleEvents, stage: StageShape, place: int) -> tuple[int, int]:
        """The sampled stage and block for a block of a stage."""
        own = SAMPLED_STAGES[stage.kind]
        if place == 0:
            return own, 0
        if place == len(stage.modes) - 1:
            return own, sample.blocks[own] - 1
        return (own if sample.blocks[own] > 2 else SAMPLED_STAGES[MIDDLE]), 1


def _layer_of(sample: SampleEvents, stage: int, block: int) -> int:
    """Layer number of a block in the sample, where the other rank's stage has one block."""
    return sum(sample.blocks.get(number, 1) for number in range(stage)) + block


def _assign_positions(sample: StageSample) -> SampleEvents:
    """Assign the events of a sample to positions."""
    numbers = {SAMPLED_STAGES[kind]: count for kind, count in sample.layers.items()}
    allocations, found = iter(sample.action_results), _PositionFinder(numbers, handed_over=set(sample.action_results))
    for step in (0, 1):
        event_segments = [segment for segment in sample.event_segments if segment.step == step]
        end = next(place for place, segment in enumerate(event_segments) if segment.label == OPTIMIZER_STEP)
        found.step(step, event_segments[:end], iter(sample.schedule), allocations)
    event_segments = _numbered_groups(found.event_segments, numbers)
    handed_over = frozenset(found.handed_over)
    events = SampleEvents(event_segments, numbers, None, sample.reduced_gradients, handed_over, found.results)
    _check_handed_over_last(events)
    return events


@dataclass
class _PositionFinder:
    """Positions of the sampled rank's events."""

    blocks: Mapping[int, int]
    handed_over: set[int]
    event_segments: dict[StepPosition, list[EventSegment]] = field(default_factory=dict)
    results: dict[StepPosition, int] = field(default_factory=dict)

    def step(
        self,
        step: int,
        event_segments: Sequence[EventSegment],
        actions: Iterator[ScheduledAction],
        allocations: Iterator[int],
    ) -> None:
        """Find the positions of a step's segments, in order."""
        at, reducing = StepPosition(step, NOWHERE, None, PROLOGUE, None), False
        for segment in event_segments:
            if segment.label.startswith(ACTION):
                scheduled = next(actions)
                at = StepPosition(
                    step, scheduled.action.stage, 0 if scheduled.first else 1, f"{scheduled.action.kind} before", None
                )
            elif segment.label == BETWEEN_ACTIONS:
                allocation = next(allocations)
                if allocation != NOT_TRACKED:
                    self.results[at._replace(part=at.part[0] + RESULT, block=None)] = allocation
                at = at._replace(part=BETWEEN_ACTIONS, block=None)
            elif segment.label.startswith(REDUCE):
                at, reducing = StepPosition(step, int(segment.label.split()[1]), None, "reduce", None), True
            elif segment.label == GROUP:
                at = at._replace(part=GROUP, block=0 if at.block is None else at.block + 1)
            elif reducing:
                at = at._replace(part="rest", block=None)
            elif at.micro is not None and ", block " in segment.label:
                first = sum(self.blocks.get(stage, 1) for stage in range(at.stage))
                at = at._replace(part=f"{at.part[0]} block", block=int(segment.label.partition(", block ")[2]) - first)
            elif at.block is not None:
                at = at._replace(part=f"{at.part[0]} after", block=None)
            if at.part == BETWEEN_ACTIONS:
                self._between(segment)
            else:
                self.event_segments.setdefault(at, []).append(segment)

    def _between(self, segment: EventSegment) -> None:
        """Check that only handed-over hidden states are released between actions."""
        self.handed_over.update(event.allocation for event in segment.events if event.size)
        released = {event.allocation for event in segment.events if not event.size and event.allocation > 0}
        if not released <= self.handed_over:
            raise ExtrapolationError("more than hidden states is released between actions")


def _numbered_groups(
    event_segments: Mapping[StepPosition, list[EventSegment]], blocks: Mapping[int, int]
) -> dict[StepPosition, list[EventSegment]]:
    """Number parameter groups as their blocks; the group of a stage's other parameters comes first, as -1."""
    counts: dict[tuple[int, int], int] = {}
    for position in event_segments:
        if position.part == GROUP:
            counts[position.step, position.stage] = counts.get((position.step, position.stage), 0) + 1
    found: dict[StepPosition, list[EventSegment]] = {}
    for position, segments in event_segments.items():
        if position.part == GROUP and position.block is not None:
            ends = counts[position.step, position.stage] - blocks[position.stage]
            found[position._replace(block=position.block - ends)] = segments
        else:
            found[position] = segments
    return found


def _check_handed_over_last(sample: SampleEvents) -> None:
    """Check that an action releases hidden states last, as the simulation does."""
    over: set[StepPosition] = set()
    for position, event_segments in sample.event_segments.items():
        action = position._replace(part=position.part[:1], block=None)
        for event in (event for segment in event_segments for event in segment.events):
            is_hidden = not event.size and event.allocation in sample.handed_over
            if action in over and not is_hidden:
                raise ExtrapolationError("an action releases other storages after hidden states")
            if is_hidden:
                over.add(action)
