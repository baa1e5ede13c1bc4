"""The story of a pipeline rank's step, woven from the sampled rank's along its rehearsed schedule."""

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
from titan_exp.plan.extrapolate.events_no_pipeline import END, PROLOGUE, gradient_named, loss_of, named_block, renamed
from titan_exp.plan.extrapolate.optimizer_step import OPTIMIZER_STEP
from titan_exp.plan.extrapolate.schedule_simulation import ScheduledAction, ScheduleSimulation
from titan_exp.plan.extrapolate.segments import NOTHING, EventSegment
from titan_exp.plan.extrapolate.stage_sample import FIRST, GROUP, LAST, MIDDLE, OVER, REDUCE, TURN, StageSample
from titan_exp.plan.extrapolate.stages import StageShape
from titan_exp.plan.trace.memory_tracker import CATEGORIES

NUMBERS = {FIRST: 0, MIDDLE: 1, LAST: 3}
"""Stages of the sampled rank, by kind."""
MADE = " made"


@dataclass(frozen=True)
class StageEvents:
    """What stages of several blocks, or of one, do in a small run."""

    ways: Sequence[SampleEvents]
    """One for each way of recomputation."""
    hidden: Sequence[tuple[int, str]]
    """Of hidden states, by kind as in a rehearsal: bytes and what they are for."""


def stage_events(samples: Sequence[StageSample]) -> StageEvents:
    """What happens where in small runs that differ in recomputation alone."""
    hidden = [(int(size.sum()), CATEGORIES[int(size.argmax())]) for size in samples[0].sizes]
    return StageEvents([_story(sample) for sample in samples], hidden)


def compose_stages(
    stories: Mapping[bool, StageEvents],
    stages: Sequence[StageShape],
    layers: Sequence[Sequence[int]],
    rehearsal: ScheduleSimulation,
    tail: OptimizerStepEvents,
    *,
    workspace: int,
) -> tuple[EventComposer, int]:
    """Weave two steps of a rank; returns them, and the bytes of reduced gradients.

    Args:
        stories: for stages of several blocks, and for those of one.
        stages: of the rank.
        layers: numbers of every stage's layers.
        rehearsal: of its schedule.
        tail: build and ends of the steps of a rank with these stages.
        workspace: as of `EventComposer`.

    Raises:
        Unwoven: they cannot be.
    """
    weaver, size = EventComposer({stage.number: len(stage.modes) for stage in stages}, workspace), 0
    rank = _Rank(weaver, stories, stages, layers)
    weaver.build(tail)
    for step in (0, 1):
        if step:
            weaver.begin()
        size = rank.step(step, rehearsal, tail)
    return weaver, size


class _Rank:
    def __init__(
        self,
        weaver: EventComposer,
        stories: Mapping[bool, StageEvents],
        stages: Sequence[StageShape],
        layers: Sequence[Sequence[int]],
    ) -> None:
        self._weaver, self._stages, self._layers = weaver, {stage.number: stage for stage in stages}, layers
        self._stories = {stage.number: stories[len(stage.modes) == 1] for stage in stages}

    def step(self, step: int, rehearsal: ScheduleSimulation, tail: OptimizerStepEvents) -> int:
        weaver, story = self._weaver, next(iter(self._stories.values()))
        opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
        weaver.play(story.ways[0], opening, opening)
        hidden: dict[int, int] = {}
        during, made, gone = False, list[int](), list[int]()
        for heard in rehearsal.heard:
            if heard.what == "turn":
                during, made, gone = True, [], []
                self._act(step, rehearsal.turns[heard.which])
            elif heard.what == "over":
                during = False
                for number in made:
                    hidden[number] = self._made(step, rehearsal.turns[heard.which])
                for number in gone:
                    weaver.death(hidden[number])
            elif during:
                (made if heard.what == "born" else gone).append(heard.which)
            elif heard.what == "born":
                hidden[heard.which] = weaver.birth(*story.hidden[heard.kind])
            else:
                weaver.death(hidden[heard.which])
        for number in self._stages:
            self._reduce(step, number)
        own = (layer for number in self._stages for layer in self._layers[number])
        layers = dict(zip(tail.layers, own, strict=True))
        gradients = {name: self._gradient(step, renamed(name, layers)) for name in tail.gradients[step].values()}
        return weaver.end(tail, step, gradients, loss_of(weaver, story.ways[0], step))

    def _act(self, step: int, turn: ScheduledAction) -> None:
        number, kind, micro = turn.action
        stage, ways = self._stages[number], self._stories[number].ways
        own, there, modes = NUMBERS[stage.kind], 0 if turn.first else 1, stage.modes
        places = list(range(len(modes)))
        if kind != "F":
            places.reverse()
        source, at = (
            StepPosition(step, own, there, f"{kind} before", None),
            StepPosition(step, number, micro, f"{kind} before", None),
        )
        self._weaver.play(ways[modes[places[0]]], source, at)
        for place in places:
            way, part = ways[modes[place]], f"{kind} block"
            like, block = self._like(way, stage, place)
            self._weaver.play(
                way,
                source._replace(stage=like, part=part, block=block),
                at._replace(part=part, block=place),
                self._layers[number][place],
            )
        part = f"{kind} after"
        self._weaver.play(ways[modes[places[-1]]], source._replace(part=part), at._replace(part=part))

    def _made(self, step: int, turn: ScheduledAction) -> int:
        """What a turn that is over has made."""
        number, kind, micro = turn.action
        stage = self._stages[number]
        way = self._stories[number].ways[stage.modes[-1]]
        source = StepPosition(step, NUMBERS[stage.kind], 0 if turn.first else 1, kind + MADE, None)
        if source not in way.made:
            raise ExtrapolationError("an action makes nothing in the small run")
        return self._weaver.find(way, way.made[source], source, StepPosition(step, number, micro, kind + MADE, None))

    def _reduce(self, step: int, number: int) -> None:
        stage, way = self._stages[number], self._stories[number].ways[0]
        own = StepPosition(step, NUMBERS[stage.kind], None, "reduce", None)
        at = own._replace(stage=number)
        self._weaver.play(way, own, at)
        if own._replace(part=GROUP, block=-1) in way.scenes:
            self._weaver.play(way, own._replace(part=GROUP, block=-1), at._replace(part=GROUP, block=-1))
        if own._replace(part=GROUP, block=0) in way.scenes:
            for place in range(len(stage.modes)):
                source, block = self._like(way, stage, place)
                there = StepPosition(step, source, None, GROUP, block)
                self._weaver.play(way, there, at._replace(part=GROUP, block=place))
        self._weaver.play(way, own._replace(part="rest"), at._replace(part="rest"))

    def _gradient(self, step: int, name: str) -> int:
        layer, pattern = named_block(name)
        if layer is None:
            kinds = [stage for stage in self._stages.values() if stage.kind in (FIRST, LAST)]
            found = [stage for stage in kinds if name in self._stories[stage.number].ways[0].gradients[step]]
            # A name of either end is one of that end alone.
            for stage in found:
                way, own = self._stories[stage.number].ways[0], NUMBERS[stage.kind]
                birth = gradient_named(way, step, name)
                if way.origins[birth].spot.stage == own:
                    there = StepPosition(step, own, None, END, None)
                    return self._weaver.find(way, birth, there, there._replace(stage=stage.number))
            raise ExtrapolationError(f"{name} has no gradient in the small run")
        number = next(number for number, its in enumerate(self._layers) if layer in its)
        stage, place = self._stages[number], self._layers[number].index(layer)
        way = self._stories[number].ways[stage.modes[place]]
        source, block = self._like(way, stage, place)
        birth = gradient_named(way, step, pattern.format(_layer_of(way, source, block)))
        there = StepPosition(step, source, None, END, block)
        return self._weaver.find(way, birth, there, StepPosition(step, number, None, END, place))

    @staticmethod
    def _like(way: SampleEvents, stage: StageShape, place: int) -> tuple[int, int]:
        """The stage and the block of a small run that a block of a stage is like."""
        own = NUMBERS[stage.kind]
        if place == 0:
            return own, 0
        if place == len(stage.modes) - 1:
            return own, way.blocks[own] - 1
        return (own if way.blocks[own] > 2 else NUMBERS[MIDDLE]), 1


def _layer_of(way: SampleEvents, stage: int, block: int) -> int:
    """Number of a block among all of the small run's, in which the stage of the other rank has one."""
    return sum(way.blocks.get(number, 1) for number in range(stage)) + block


def _story(sample: StageSample) -> SampleEvents:
    numbers = {NUMBERS[kind]: count for kind, count in sample.layers.items()}
    births, found = iter(sample.made), _Found(numbers, handed=set(sample.made))
    for step in (0, 1):
        scenes = [scene for scene in sample.scenes if scene.step == step]
        end = next(place for place, scene in enumerate(scenes) if scene.label == OPTIMIZER_STEP)
        found.step(step, scenes[:end], iter(sample.turns), births)
    scenes = _numbered_groups(found.scenes, numbers)
    story = SampleEvents(scenes, numbers, None, sample.reduced, frozenset(found.handed), found.made)
    _require_handed_last(story)
    return story


@dataclass
class _Found:
    """What happens where in the sampled rank."""

    blocks: Mapping[int, int]
    handed: set[int]
    scenes: dict[StepPosition, list[EventSegment]] = field(default_factory=dict)
    made: dict[StepPosition, int] = field(default_factory=dict)

    def step(
        self, step: int, scenes: Sequence[EventSegment], turns: Iterator[ScheduledAction], births: Iterator[int]
    ) -> None:
        """Find the spots of a step's scenes, from its beginning to its end."""
        at, reducing = StepPosition(step, NOWHERE, None, PROLOGUE, None), False
        for scene in scenes:
            if scene.label.startswith(TURN):
                turn = next(turns)
                at = StepPosition(step, turn.action.stage, 0 if turn.first else 1, f"{turn.action.kind} before", None)
            elif scene.label == OVER:
                birth = next(births)
                if birth != NOTHING:
                    self.made[at._replace(part=at.part[0] + MADE, block=None)] = birth
                at = at._replace(part=OVER, block=None)
            elif scene.label.startswith(REDUCE):
                at, reducing = StepPosition(step, int(scene.label.split()[1]), None, "reduce", None), True
            elif scene.label == GROUP:
                at = at._replace(part=GROUP, block=0 if at.block is None else at.block + 1)
            elif reducing:
                at = at._replace(part="rest", block=None)
            elif at.micro is not None and ", block " in scene.label:
                first = sum(self.blocks.get(stage, 1) for stage in range(at.stage))
                at = at._replace(part=f"{at.part[0]} block", block=int(scene.label.partition(", block ")[2]) - first)
            elif at.block is not None:
                at = at._replace(part=f"{at.part[0]} after", block=None)
            if at.part == OVER:
                self._between(scene)
            else:
                self.scenes.setdefault(at, []).append(scene)

    def _between(self, scene: EventSegment) -> None:
        """Between actions, hidden states are received, and go."""
        self.handed.update(it.birth for it in scene.told if it.size)
        if any(not it.size and it.birth > 0 and it.birth not in self.handed for it in scene.told):
            raise ExtrapolationError("between actions more goes than what is handed over")


def _numbered_groups(
    scenes: Mapping[StepPosition, list[EventSegment]], blocks: Mapping[int, int]
) -> dict[StepPosition, list[EventSegment]]:
    """The same, groups of parameters numbered as their blocks: before them comes that of what else a stage has."""
    counts: dict[tuple[int, int], int] = {}
    for spot in scenes:
        if spot.part == GROUP:
            counts[spot.step, spot.stage] = counts.get((spot.step, spot.stage), 0) + 1
    found: dict[StepPosition, list[EventSegment]] = {}
    for spot, its in scenes.items():
        if spot.part == GROUP and spot.block is not None:
            ends = counts[spot.step, spot.stage] - blocks[spot.stage]
            found[spot._replace(block=spot.block - ends)] = its
        else:
            found[spot] = its
    return found


def _require_handed_last(story: SampleEvents) -> None:
    """Of an action's deaths, those of what was handed over come last, as a rehearsal has them."""
    over: set[StepPosition] = set()
    for spot, scenes in story.scenes.items():
        action = spot._replace(part=spot.part[:1], block=None)
        for it in (it for scene in scenes for it in scene.told):
            handed = not it.size and it.birth in story.handed
            if action in over and not handed:
                raise ExtrapolationError("after what was handed over more goes in an action")
            if handed:
                over.add(action)
