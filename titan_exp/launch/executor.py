"""Where runs are carried out, behind one interface: sweeps, `status`, `cancel` and `retry` know no scheduler."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_plan import RunPlan
from titan_exp.tracking.run_folder.run_folder import RunFolder


@dataclass(frozen=True)
class Submission:
    """What became of one plan that was to be started."""

    plan: RunPlan
    """The run."""
    outcome: Literal["submitted", "done", "queued", "running", "failed", "preempted", "refused"]
    """`submitted` now; or `done`, `queued` or `running` before, and left alone; or how it ended, where the backend
    waits for that; or `refused`, and the reason says why."""
    job_id: str | None = None
    """The scheduler's number."""
    reason: str | None = None
    """In words, where there is something to say."""


@dataclass(frozen=True)
class JobStatus:
    """What a scheduler says of a run now. The run folder says the rest."""

    state: Literal["queued", "running", "gone", "unknown"]
    """`gone`: the scheduler has ended it or forgotten it; `unknown`: nobody could be asked."""
    job_id: str | None = None
    """The scheduler's number."""
    reason: str | None = None
    """Why it waits, or how it ended, in words."""


class Executor(Protocol):
    """One way to carry out runs."""

    def submit(self, plans: Sequence[RunPlan], *, say: Callable[[str], None]) -> list[Submission]:
        """Start what is not done, queued or running; in the order of the plans."""
        ...

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """What the scheduler says of each run, by the folder's path; one question for all of them."""
        ...

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """End runs that wait or run, saving first where they can; says of each, by its path, what was done."""
        ...


def executor_for(kind: str) -> Executor:
    """The backend of a kind: `cluster.kind` of a configuration, or `launched_by` of an attempt.

    Raises:
        UserError: this version has none of that kind.
    """
    if kind in ("local", "hand"):
        from titan_exp.launch.local.executor import LocalExecutor

        return LocalExecutor()
    if kind == "slurm":
        from titan_exp.launch.slurm.executor import SlurmExecutor

        return SlurmExecutor()
    raise UserError(f"cluster.kind={kind}: this version starts no runs there. Choose cluster=local.")
