"""Pipeline schedules: properties of named schedules, parsing of CSV schedules, end time of each action, the bubble.

A schedule lists the actions of each pipeline rank in execution order. `2F0` is stage 2, forward, micro-batch 0.
"""

import csv
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from titan_exp.config.groups.parallelism import ParallelismConfig

KINDS = ("F", "B", "I", "W")
"""Forward; full backward; input gradients and weight gradients of a split backward."""

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """Computation of one stage on one micro-batch."""

    stage: int
    """Stage index."""
    kind: str
    """One of `KINDS`."""
    microbatch: int
    """Micro-batch index."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]
"""Actions by pipeline rank, in order."""


@dataclass(frozen=True)
class ScheduleTraits:
    """Properties of a named schedule."""

    stages_per_rank: int
    """Default number of stages per rank."""
    fixed: bool
    """True if only the default number of stages is valid."""
    v_shaped: bool = False
    """True if stages are placed down the ranks and up again, with the last on the first rank; else round-robin."""
    splits_backward: bool = False
    """True if weight gradients are computed after input gradients, in idle time."""
    in_rounds: bool = False
    """True if micro-batches must divide evenly into rounds of pp micro-batches."""
    fill: int = 0
    """Minimum number of micro-batches per rank."""

    def takes(self, microbatches: int, ranks: int) -> bool:
        """True if the schedule exists for this number of micro-batches."""
        rounds = max(1, microbatches // ranks) if self.in_rounds else 1
        return microbatches >= max(1, self.fill * ranks) and microbatches % rounds == 0


SCHEDULES = {
    "GPipe": ScheduleTraits(1, fixed=True),
    "1F1B": ScheduleTraits(1, fixed=True),
    "Interleaved1F1B": ScheduleTraits(2, fixed=False, in_rounds=True),
    "LoopedBFS": ScheduleTraits(2, fixed=False),
    "InterleavedZeroBubble": ScheduleTraits(2, fixed=False, splits_backward=True, in_rounds=True),
    "ZBVZeroBubble": ScheduleTraits(2, fixed=True, v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleTraits(2, fixed=True, v_shaped=True, splits_backward=True, fill=2),
}
"""Built-in values of `parallelism.pp_schedule`; anything else is the path of a CSV file."""


class MalformedSchedule(ValueError):
    """Error in a schedule file; the message includes the location."""


def is_file(name: str) -> bool:
    """True if a schedule is read from a file."""
    return name.lower().endswith(".csv")


def read_schedule(path: str | Path) -> Schedule:
    """Read a CSV file in torch's compute-only format: a row per rank, an action per cell. Empty (idle) cells are
    skipped. `(1F2;0B1)OVERLAP_F_B` is two actions, in this order. Raises OSError if the file cannot be read, and
    MalformedSchedule if a cell is not an action."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    schedule = []
    for line, row in ((line, row) for line, row in enumerate(rows, 1) if row):
        cells = [_read_cell(cell.strip(), f"cell {number} of row {line}") for number, cell in enumerate(row, 1)]
        schedule.append([*chain(*cells)])
    return schedule


def placement_of(orders: Schedule) -> dict[int, int]:
    """Rank of each stage. Raises MalformedSchedule if a stage is on two ranks, or a stage number is missing."""
    placement: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if (other := placement.setdefault(action.stage, rank)) != rank:
                stage = f"stage {action.stage}"
                raise MalformedSchedule(f"{stage} is on ranks {other} and {rank}, and a stage has one rank")
    missing = sorted(set(range(max(placement, default=0) + 1)) - set(placement))
    if missing:
        raise MalformedSchedule(f"stage {missing[0]} does nothing, and the numbers of stages run from 0 without a gap")
    return placement


def placement(schedule: ScheduleTraits, ranks: int, stages: int) -> list[int]:
    """Rank of each stage of a named schedule."""
    if schedule.v_shaped:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def takes(parallelism: ParallelismConfig, microbatches: int) -> bool:
    """True if the configured schedule exists for this number of micro-batches in one pass."""
    if is_file(parallelism.pp_schedule):
        return microbatches == microbatches_of(read_schedule(parallelism.pp_schedule))
    return SCHEDULES[parallelism.pp_schedule].takes(microbatches, parallelism.pp)


def splits_backward(orders: Schedule) -> bool:
    """True if any backward pass is split."""
    return any(action.kind == "W" for order in orders for action in order)


def microbatches_of(orders: Schedule) -> int:
    """Number of micro-batches of a schedule."""
    return 1 + max((action.microbatch for order in orders for action in order), default=-1)


def check_complete(orders: Schedule) -> None:
    """Check that every stage runs every micro-batch once forward and once backward (full or split). Raises
    MalformedSchedule if an action is missing or repeated."""
    seen: set[Action] = set()
    for action in (action for order in orders for action in order):
        if action in seen:
            raise MalformedSchedule(f"{action} occurs twice")
        seen.add(action)
    for stage in sorted(placement_of(orders)):
        for microbatch in range(microbatches_of(orders)):
            kinds = [kind for kind in KINDS if Action(stage, kind, microbatch) in seen]
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                found = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
                needed = "it has to go once forward (F) and once backward (B, or I and W)"
                raise MalformedSchedule(f"stage {stage} does {found} of micro-batch {microbatch}, and {needed}")


def _read_cell(cell: str, where: str) -> Sequence[Action]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    texts = [part.strip() for part in overlapped[1].split(";")] if overlapped else [cell] if cell else []
    actions = []
    for text in texts:
        found = _ACTION.fullmatch(text)
        if found is None:
            raise MalformedSchedule(f"{where} is {text!r}, which is not an action such as 2F0, 2B0, 2I0 or 2W0")
        actions.append(Action(int(found[1]), found[2], int(found[3])))
    return actions


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
    """Simulate a schedule: an action starts when its rank is idle and its inputs exist. `stage_costs` are the forward
    times of each stage, 1 by default. Raises MalformedSchedule at a deadlock."""
    actions = [action for order in orders for action in order]
    last = max((action.stage for action in actions), default=0)
    costs = [1.0] * (last + 1) if stage_costs is None else stage_costs
    end: dict[Action, float] = {}
    left = [deque(order) for order in orders]
    free = [0.0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(left):
            while order:
                needed = [_ended(end, alternatives) for alternatives in _needs(order[0], last)]
                if None in needed:
                    break
                action, progress = order.popleft(), True
                start = max([free[rank], *(time for time in needed if time is not None)])
                end[action] = free[rank] = start + COST[action.kind] * costs[action.stage]
    for rank, order in enumerate(left):
        if order:
            missing = next(needs[0] for needs in _needs(order[0], last) if _ended(end, needs) is None)
            raise MalformedSchedule(f"rank {rank} deadlocks in {order[0]}: {missing} never comes before it")
    total = max(free, default=0.0) * len(orders)
    busy = sum(COST[action.kind] * costs[action.stage] for action in actions)
    return Timeline(end, 1 - busy / total if total else 0.0)


def pipeline_seconds(totals: Mapping[int, float], degree: int, bubble: float) -> float:
    """Step seconds of a pipeline from the busy seconds of its ranks, and its bubble with equally slow ones. The slowest
    rank idles while the others fill and drain the pipeline, so the bubble lasts as long as with the mean of theirs.
    Ranks between the second and the last count as the second, and ranks that are not known as the slowest."""
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
