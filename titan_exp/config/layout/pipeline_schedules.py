"""Pipeline schedules: what each of them takes, and the actions that one in a file consists of.

A schedule is a list of actions for each pipeline rank, executed in order. An action is written `2F0`: stage 2, forward,
micro-batch 0.
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from titan_exp.config.groups.parallelism import ParallelismConfig

KINDS = ("F", "B", "I", "W")
"""Forward; backward; or backward in two: the gradient of the stage's input, and later those of its weights."""

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch."""

    stage: int
    """Number of the stage, from 0."""
    kind: str
    """One of `KINDS`."""
    microbatch: int
    """Number of the micro-batch, from 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Schedule = list[list[Action]]
"""The actions of each pipeline rank, in order."""


@dataclass(frozen=True)
class ScheduleTraits:
    """What a named schedule takes."""

    stages_per_rank: int
    """Stages on a rank where the configuration does not say."""
    fixed: bool
    """Whether it takes no other number."""
    v_shaped: bool = False
    """Stages run down the ranks and up again, so that the first rank has the last stage; else they go round."""
    splits_backward: bool = False
    """Whether gradients of weights are computed apart from those of inputs, in the time a rank would else be idle."""
    in_rounds: bool = False
    """Whether micro-batches divide evenly into as many rounds of pp micro-batches as they have room for."""
    fill: int = 0
    """Micro-batches that it needs at least, for each rank."""

    def takes(self, microbatches: int, ranks: int) -> bool:
        """Whether it can be laid out for so many micro-batches."""
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
"""What `parallelism.pp_schedule` may name; anything else is the path of a CSV file."""


class MalformedSchedule(ValueError):
    """A file that is no schedule; the message says what is wrong and where."""


def is_file(name: str) -> bool:
    """Whether a schedule is read from a file instead of named."""
    return name.lower().endswith(".csv")


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in a CSV file in torch's compute-only format: one row a rank, one action a cell.

    Empty cells are the time that a rank waits, and count nothing. `(1F2;0B1)OVERLAP_F_B` is two actions, in this order.

    Raises:
        OSError: the file cannot be read.
        MalformedSchedule: a cell is no action.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return [
        [
            action
            for number, cell in enumerate(row, 1)
            for action in _read_cell(cell.strip(), f"cell {number} of row {line}")
        ]
        for line, row in enumerate(rows, 1)
        if row
    ]


def placement_of(orders: Schedule) -> dict[int, int]:
    """The rank of each stage.

    Raises:
        MalformedSchedule: a stage is on two ranks, or a number is left out.
    """
    placement: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if placement.setdefault(action.stage, rank) != rank:
                raise MalformedSchedule(
                    f"stage {action.stage} is on ranks {placement[action.stage]} and {rank}, and a stage has one rank"
                )
    missing = sorted(set(range(max(placement, default=0) + 1)) - set(placement))
    if missing:
        raise MalformedSchedule(f"stage {missing[0]} does nothing; stages are numbered from 0 without a gap")
    return placement


def placement(schedule: ScheduleTraits, ranks: int, stages: int) -> list[int]:
    """The rank of each stage of a named schedule."""
    if schedule.v_shaped:
        return [*range(ranks), *reversed(range(ranks))]
    return [stage % ranks for stage in range(stages)]


def takes(parallelism: ParallelismConfig, microbatches: int) -> bool:
    """True if the configured schedule can be laid out for this number of micro-batches in one pass."""
    if is_file(parallelism.pp_schedule):
        return microbatches == microbatches_of(read_schedule(parallelism.pp_schedule))
    return SCHEDULES[parallelism.pp_schedule].takes(microbatches, parallelism.pp)


def splits_backward(orders: Schedule) -> bool:
    """Whether any backward pass is in two."""
    return any(action.kind == "W" for order in orders for action in order)


def microbatches_of(orders: Schedule) -> int:
    """How many micro-batches a schedule is for."""
    return 1 + max((action.microbatch for order in orders for action in order), default=-1)


def check_complete(orders: Schedule) -> None:
    """Every stage does every micro-batch once forward and once backward, whole or in two.

    Raises:
        MalformedSchedule: it does not.
    """
    seen: set[Action] = set()
    for action in (action for order in orders for action in order):
        if action in seen:
            raise MalformedSchedule(f"{action} is there twice")
        seen.add(action)
    for stage in sorted(placement_of(orders)):
        for microbatch in range(microbatches_of(orders)):
            kinds = [kind for kind in KINDS if Action(stage, kind, microbatch) in seen]
            if kinds not in (["F", "B"], ["F", "I", "W"]):
                found = ", ".join(f"{stage}{kind}{microbatch}" for kind in kinds) or "nothing"
                raise MalformedSchedule(
                    f"stage {stage} does {found} of micro-batch {microbatch}, and each is done once forward (F) and "
                    "once backward (B, or I and W)"
                )


def _read_cell(cell: str, where: str) -> Sequence[Action]:
    thread_map = _OVERLAPPED.fullmatch(cell)
    texts = [part.strip() for part in thread_map[1].split(";")] if thread_map else [cell] if cell else []
    actions = []
    for text in texts:
        found = _ACTION.fullmatch(text)
        if found is None:
            raise MalformedSchedule(f"{where} is {text!r}, and an action is written like 2F0, 2B0, 2I0 or 2W0")
        actions.append(Action(int(found[1]), found[2], int(found[3])))
    return actions
