"""Parts of training that keep a journal of their calls."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.trainer.part import Part, Phase, Run, Step


class Call(NamedTuple):
    """A call of `after`."""

    group: int
    start: int
    step: int
    steps: int
    """Calls so far, by the part's state."""
    agreed: int


class Observes(Part):
    """Notes its calls after steps in the run folder, and counts them in its state. At the first attempt, every group
    kills itself before step `die_at`, once the state of step `saved` is on disk."""

    def __init__(self, die_at: int = 0, saved: int = 0) -> None:
        self.die_at, self.saved, self.steps = die_at, saved, 0

    def begin(self, run: Run) -> None:
        group = ReplicaGroup.from_environment()
        assert group is not None
        self.group, self.folder, self.attempt = group, run.folder, run.report.attempt

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        self.steps = state["steps"] if state else 0

    def before(self, step: int) -> None:
        if step == self.die_at and self.attempt == 1:
            deadline = time.monotonic() + 60
            while not (self.folder.checkpoints / f"step-{self.saved:08d}").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, step: Step) -> dict[str, float]:
        self.steps += 1
        call = Call(self.group.number, self.group.start, step.step, self.steps, int(step.agreed))
        with (self.folder.path / f"{self.prefix[:-1]}.txt").open("a") as journal:
            journal.write(" ".join(map(str, call)) + "\n")
        return {"steps": self.steps}


class Decides(Observes):
    phase = Phase.DECIDE


def journal(path: Path, label: str) -> list[Call]:
    """Calls of a part, in the order of each group."""
    lines = (path / f"{label}.txt").read_text().splitlines()
    return [Call(*map(int, line.split())) for line in lines]
