"""Positions of a sample's segments: the stage, micro-batch, part and block to which each belongs."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titan_exp.plan.extrapolate.schedule_simulation import ScheduledAction
from titan_exp.plan.extrapolate.stages import (
    GROUP,
    PROLOGUES,
    REDUCE,
    REST,
    SUM,
    ExtrapolationError,
    StepPosition,
    first_layer,
)
from titan_exp.plan.trace import segments as labels
from titan_exp.plan.trace.segments import NOT_TRACKED, Segment

RESULT = " result"
"""Suffix of the part of an action at which its result is known."""


@dataclass
class PositionFinder:
    """Assigns positions to a sample's segments."""

    blocks: Mapping[int, int]
    """Number of blocks by stage number."""
    action_results: Sequence[int]
    """Allocations of action results, in order."""
    segments: dict[StepPosition, list[Segment]] = field(default_factory=dict)
    between: list[Segment] = field(default_factory=list)
    """Segments of messages between actions."""
    results: dict[StepPosition, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hidden_states, self._results = set(self.action_results), iter(self.action_results)

    def step(self, segments: Sequence[Segment], actions: Iterator[ScheduledAction]) -> None:
        """Assign positions to a step's segments, in order."""
        at = PROLOGUES[segments[0].step] if segments else PROLOGUES[0]
        for segment in segments:
            if segment.label in (labels.TIED_SUM, labels.OPTIMIZER_STEP):
                return
            at = self._next(at, segment.label, actions)
            if at.part == labels.BETWEEN_ACTIONS:
                self._between(segment)
            else:
                self.segments.setdefault(at, []).append(segment)

    def _next(self, at: StepPosition, label: str, actions: Iterator[ScheduledAction]) -> StepPosition:
        """Position of the segment that follows `at`."""
        if label == labels.MICRO_BATCH:
            return StepPosition(at.step, 0, 0 if at.micro is None else at.micro + 1, "F before", None)
        if label.startswith(labels.ACTION):
            action = next(actions).action
            return StepPosition(at.step, action.stage, action.microbatch, f"{action.kind} before", None)
        if label == labels.BETWEEN_ACTIONS:
            allocation = next(self._results, NOT_TRACKED)
            if allocation != NOT_TRACKED:
                self.results[at._replace(part=at.part[0] + RESULT, block=None)] = allocation
            return at._replace(part=labels.BETWEEN_ACTIONS, block=None)
        if label.startswith(labels.REDUCE):
            return StepPosition(at.step, int(label.split()[1]), None, REDUCE, None)
        if label in (labels.GROUP, labels.GRADIENT_SUM):
            part = GROUP if label == labels.GROUP else at.part[0] + SUM
            return at._replace(part=part, block=at.block + 1 if at.part == part and at.block is not None else 0)
        return self._next_phase(at, label)

    def _next_phase(self, at: StepPosition, phase: str) -> StepPosition:
        if at.part in {REDUCE, GROUP}:
            return at._replace(part=REST, block=None)
        if at.micro is not None and ", block " in phase:
            block = int(phase.partition(", block ")[2]) - first_layer(self.blocks, at.stage)
            kind = at.part[0] if at.part[0] in "IW" else phase[0].upper()
            return at._replace(part=f"{kind} block", block=block)
        return at if at.block is None else at._replace(part=f"{at.part[0]} after", block=None)

    def _between(self, segment: Segment) -> None:
        """Add a segment between actions, which may release only hidden states."""
        self.between.append(segment)
        self.hidden_states.update(event.allocation for event in segment.events if event.size)
        released = {event.allocation for event in segment.events if not event.size and event.allocation > 0}
        if not released <= self.hidden_states:
            raise ExtrapolationError("more than hidden states is released between actions")


def numbered_groups(
    segments: Mapping[StepPosition, list[Segment]], blocks: Mapping[int, int]
) -> dict[StepPosition, list[Segment]]:
    """Number parameter groups by block; the group of a stage's other parameters comes first, as -1."""
    counts = Counter(position._replace(block=None) for position in segments if _is_group(position))

    def numbered(position: StepPosition) -> StepPosition:
        if not _is_group(position) or position.block is None:
            return position
        return position._replace(block=position.block - counts[position._replace(block=None)] + blocks[position.stage])

    return {numbered(position): found for position, found in segments.items()}


def _is_group(position: StepPosition) -> bool:
    return position.part == GROUP or position.part.endswith(SUM)


def check_hidden_states_last(
    segments: Mapping[StepPosition, Sequence[Segment]], hidden_states: Collection[int]
) -> None:
    """Check that an action releases hidden states last, as the simulation assumes."""
    over: set[StepPosition] = set()
    for position, found in segments.items():
        action = position._replace(part=position.part[:1], block=None)
        for event in (event for segment in found for event in segment.events):
            is_hidden = not event.size and event.allocation in hidden_states
            if action in over and not is_hidden:
                raise ExtrapolationError("an action releases other storages after hidden states")
            if is_hidden:
                over.add(action)
