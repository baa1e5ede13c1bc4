"""History of replica groups: the number of groups among which each step of a run was divided, from groups.jsonl.

Group j of n takes the micro-batches j, j + n, j + 2n and so on, and all groups hold the same weights. So the numbers of
groups, not their names, determine the sums of a step, bit by bit.
"""

import json
from bisect import bisect_left
from pathlib import Path

from titan_exp.config.errors.user_error import UserError


class GroupHistory:
    """Divisions of the steps that a run kept. Its steps after the last quorum are divided like the last one."""

    def __init__(self, run_folder: str | Path) -> None:
        self._path = Path(run_folder).expanduser()
        self._steps: list[int] = []
        """Steps committed before each change, ascending."""
        self._groups: list[int] = []
        log = self._path / "groups.jsonl"
        for line in log.read_bytes().splitlines() if log.is_file() else ():
            try:
                event = json.loads(line)
            except ValueError:  # torn
                continue
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
