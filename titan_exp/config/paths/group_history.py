"""History of replica groups: the number of groups among which each step of a run was divided, from groups.jsonl.

Group j of n takes the micro-batches j, j + n, j + 2n and so on, and all groups hold the same weights. So the numbers of
groups, not their names, determine the sums of a step, bit by bit.
"""

from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import of_kind, parse_json, read_lines


class GroupEvent(TypedDict):
    """Fields of every event in groups.jsonl."""

    event: str
    attempt: int
    time: float


class Quorum(GroupEvent):
    """Fields of a quorum."""

    step: int
    quorum: int
    groups: list[int]
    joined: list[int]


class OfGroup(GroupEvent):
    """Fields of the event of one group."""

    group: int
    start: NotRequired[int]


KINDS = {"quorum": Quorum, "lighthouse started": GroupEvent}
"""Fields by event; others are of one group."""


def read_group_events(path: Path) -> Iterator[dict[str, Any]]:
    """Events in a file groups.jsonl, oldest first, none if it is missing; torn and damaged lines are left out."""
    try:
        for line in read_lines(path):
            try:
                event = parse_json(line, GroupEvent)
                yield of_kind(KINDS.get(event["event"], OfGroup), event)
            except ValueError:
                continue
    except FileNotFoundError:
        return


class GroupHistory:
    """Divisions of the steps that a run kept. Its steps after the last quorum are divided like the last one."""

    def __init__(self, run_folder: str | Path) -> None:
        self._path = Path(run_folder).expanduser()
        self._steps: list[int] = []
        """Steps committed before each change, ascending."""
        self._groups: list[int] = []
        for event in read_group_events(self._path / "groups.jsonl"):
            if event["event"] == "quorum":
                # A quorum after an earlier step, or the same, replaces what followed: a refused step is repeated, and a
                # later attempt begins at its checkpoint.
                first = bisect_left(self._steps, event["step"])
                self._steps[first:], self._groups[first:] = [event["step"]], [len(event["groups"])]

    @property
    def largest(self) -> int:
        """Most groups of a step; 0 if the run had no quorum."""
        return max(self._groups, default=0)

    def groups_of(self, step: int) -> int:
        """Number of groups that divided a step, from 1. Raises UserError if the history begins later."""
        index = bisect_left(self._steps, step) - 1
        if index < 0:
            raise UserError(
                f"cluster.group_history={self._path}: its replica groups begin after step {step}, so this step "
                "cannot be replayed. Give the run that trained it, or cluster.group_history=null."
            )
        return self._groups[index]
