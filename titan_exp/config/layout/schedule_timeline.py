"""Pipeline schedule timeline: end time of each action, and the bubble."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_exp.config.layout.pipeline_schedules import Action, MalformedSchedule, Schedule

COST = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""Relative time of an action; forward is 1, and backward has twice the matmuls."""


@dataclass(frozen=True)
class Timeline:
    """Times of a schedule without communication."""

    end: dict[Action, float]
    """End time of each action."""
    bubble: float
    """Idle share of all ranks' time until the last rank ends."""


def timeline(orders: Schedule, stage_costs: Sequence[float] | None = None) -> Timeline:
    """Simulate a schedule: an action starts when its rank is idle and its inputs exist.

    `stage_costs` are the forward times of each stage, 1 by default.

    Raises:
        MalformedSchedule: deadlock.
    """
    last = max((action.stage for order in orders for action in order), default=0)
    end: dict[Action, float] = {}
    next_of = [0] * len(orders)
    free = [0.0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while next_of[rank] < len(order):
                action = order[next_of[rank]]
                needed = [_ended(end, alternatives) for alternatives in _needs(action, last)]
                if None in needed:
                    break
                scale = 1.0 if stage_costs is None else stage_costs[action.stage]
                start = max([free[rank], *(time for time in needed if time is not None)])
                end[action] = free[rank] = start + COST[action.kind] * scale
                next_of[rank] += 1
                progress = True
    for rank, order in enumerate(orders):
        if next_of[rank] < len(order):
            stuck = order[next_of[rank]]
            missing = next(needs[0] for needs in _needs(stuck, last) if _ended(end, needs) is None)
            raise MalformedSchedule(f"rank {rank} deadlocks in {stuck}: {missing} never comes before it")
    total = max(free, default=0.0) * len(orders)
    busy = sum(
        COST[action.kind] * (1.0 if stage_costs is None else stage_costs[action.stage])
        for order in orders
        for action in order
    )
    return Timeline(end, 1 - busy / total if total else 0.0)


def pipeline_seconds(totals: Mapping[int, float], degree: int, bubble: float) -> float:
    """Step seconds of a pipeline from the busy seconds of its ranks, and its bubble with equally slow ones.

    The slowest rank idles while the others fill and drain the pipeline, so the bubble lasts as long as with the mean of
    theirs. Ranks between the second and the last count as the second, and ranks that are not known as the slowest.
    """
    slowest = max(totals.values())
    if degree == 1:
        return slowest
    first, second, last = (totals.get(rank, slowest) for rank in (0, 1, degree - 1))
    others = first + last + (degree - 2) * second - slowest
    return slowest + max(0.0, others) / (degree - 1) * bubble / (1 - bubble)


def _needs(action: Action, last: int) -> list[tuple[Action, ...]]:
    """Dependencies of an action, each as a tuple of alternatives."""
    stage, kind, microbatch = action
    if kind == "F":
        return [(Action(stage - 1, "F", microbatch),)] if stage else []
    if kind == "W":
        return [(Action(stage, "I", microbatch),)]
    needs: list[tuple[Action, ...]] = [(Action(stage, "F", microbatch),)]
    if stage < last:
        needs.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
    return needs


def _ended(end: dict[Action, float], alternatives: tuple[Action, ...]) -> float | None:
    return next((end[action] for action in alternatives if action in end), None)
