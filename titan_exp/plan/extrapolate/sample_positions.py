"""Positions of a sample's segments in their stages, and storages that actions hand over to each other."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from titan_exp.plan.extrapolate.stages import ExtrapolationError, first_layer
from titan_exp.plan.trace.segments import Segment
from titan_exp.plan.trace.step_position import BETWEEN, GROUP, OPTIMIZER_STEP, SUM, TIED_SUM, StepPosition


def segments_of_passes(
    segments: Iterable[Segment], blocks: Mapping[int, int]
) -> tuple[dict[StepPosition, list[Segment]], list[Segment]]:
    """Segments before the optimizer step by position, and segments of messages between actions.

    Blocks are numbered within their stage, of which `blocks` has the number of each; so are parameter groups, and that
    of a stage's other parameters comes first, as -1.
    """
    passes, between = defaultdict[StepPosition, list[Segment]](list), list[Segment]()
    for segment in segments:
        part = segment.position.part
        if part.endswith(BETWEEN):
            between.append(segment)
        elif segment.position.step >= 0 and part not in (TIED_SUM, OPTIMIZER_STEP):
            passes[segment.position].append(segment)
    groups = Counter(position._replace(block=None) for position in passes if _is_group(position))

    def in_stage(position: StepPosition) -> StepPosition:
        if position.block is None:
            return position
        before = first_layer(blocks, position.stage)
        if _is_group(position):
            before = groups[position._replace(block=None)] - blocks[position.stage]
        return position._replace(block=position.block - before)

    return {in_stage(position): found for position, found in passes.items()}, between


def allocations_of_hidden_states(results: Collection[int], between: Iterable[Segment]) -> frozenset[int]:
    """Hidden states: results of actions, and what messages between actions allocate; these release nothing else."""
    events = [event for segment in between for event in segment.events]
    hidden = frozenset((*results, *(event.allocation for event in events if event.size)))
    if any(not event.size and event.allocation > 0 and event.allocation not in hidden for event in events):
        raise ExtrapolationError("more than hidden states is released between actions")
    return hidden


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
