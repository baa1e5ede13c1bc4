"""How a run stands now: what its files say, whether anyone holds it, and then what its backend says."""

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import JobStatus, executor_for
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

StatusName = Literal["new", "queued", "running", "done", "failed", "preempted", "lost", "unreadable"]
"""`new`: not started yet. `queued`: the scheduler has it. `lost`: it died, and nobody lived to say so."""

OLD = 60.0
"""Seconds without a sign of life after which a run that nobody is known to hold counts as lost."""
ENDED = ("done", "failed", "preempted")


@dataclass(frozen=True)
class RunStatus:
    """A run now."""

    state: StatusName
    """In one word."""
    step: int
    """Optimizer steps done."""
    reason: str | None
    """Why, where there is something to say."""
    attempt: int
    """Number of the last start; 0 before the first."""
    job_id: str | None = None
    """The scheduler's number of it."""

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("queued", "running")


def run_statuses(folders: Sequence[RunFolder]) -> dict[Path, RunStatus]:
    """How each run stands, by its folder's path. Files first; a scheduler is asked once for all that need it."""
    found: dict[Path, RunStatus] = {}
    ask: dict[str, list[RunFolder]] = {}
    for folder in folders:
        try:
            run_status, kind = _by_files(folder)
        except UserError as error:
            run_status, kind = RunStatus("unreadable", 0, str(error), 0), "local"
        found[folder.path] = run_status
        if kind != "local" and run_status.state != "done":
            ask.setdefault(kind, []).append(folder)
    for kind, unsure in ask.items():
        statuses = _ask(kind, unsure)
        for folder in unsure:
            found[folder.path] = _merge_job_status(found[folder.path], statuses.get(folder.path))
    return found


def run_status(folder: RunFolder) -> RunStatus:
    """How one run stands."""
    return run_statuses([folder])[folder.path]


def _by_files(folder: RunFolder) -> tuple[RunStatus, str]:
    """What files and locks say, and who carried the last start out."""
    state = folder.read_state()
    if state is None:
        return RunStatus("new", 0, None, 0), "local"
    attempts = folder.read_attempts() if state.state != "done" else []
    kind = attempts[-1].launched_by if attempts else "local"
    job_id = attempts[-1].job_id if attempts else None
    if state.state in ENDED:
        return RunStatus(state.state, state.step, state.reason, state.attempt, job_id), kind
    beat = folder.read_heartbeat()
    step = max(state.step, beat.step if beat and beat.time >= state.time else 0)
    if folder.holder() is not None:
        return RunStatus("running", step, None, state.attempt, job_id), kind
    if not attempts:
        return RunStatus("new", 0, None, 0), kind
    elsewhere = attempts[-1].hosts != (socket.gethostname(),)
    seen = max(state.time, attempts[-1].intent, beat.time if beat else 0.0)
    age = time.time() - seen
    if elsewhere and age < OLD:  # locks are not seen across every network disk
        return RunStatus("running", step, None, state.attempt, job_id), kind
    return RunStatus("lost", step, _lost_reason(state, age), state.attempt, job_id), kind


def _lost_reason(state: RunState, age: float) -> str:
    died = "died without a word (killed, or the machine went down)"
    return f"attempt {state.attempt} {died}; last sign of life {_ago(age)} ago" if state.attempt else died


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _ask(kind: str, folders: Iterable[RunFolder]) -> Mapping[Path, JobStatus]:
    try:
        return executor_for(kind).status(list(folders))
    except UserError:
        return {}  # who is not here, such as a scheduler looked for on a laptop, knows nothing


def _merge_job_status(run_status: RunStatus, status: JobStatus | None) -> RunStatus:
    """What the scheduler says, laid over what the files say."""
    if status is None or status.state == "unknown":
        return run_status
    step, attempt, job_id = run_status.step, run_status.attempt, status.job_id or run_status.job_id
    if status.state in ("queued", "running"):
        # Before a requeued run begins anew, its files tell of the end of the attempt before.
        return RunStatus(status.state, step, status.reason, attempt, job_id)
    if run_status.state in ("new", "running"):
        return RunStatus("lost", step, status.reason or "the scheduler has ended or forgotten it", attempt, job_id)
    return RunStatus(run_status.state, step, run_status.reason or status.reason, attempt, job_id)
