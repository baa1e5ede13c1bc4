"""Run status from files and locks, then from the executor."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, JobStatus, RunPlan, executor_for, size_text, trusted_executor
from titan_exp.launch.state.close_attempt import DIED_UNRECORDED
from titan_exp.tracking.number_format import format_duration
from titan_exp.tracking.run_folder.attempts import ENDED_STATES
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

StatusName = Literal["new", "queued", "running", "done", "failed", "preempted", "lost", "unknown", "unreadable"]
"""`new`: never started. `queued`: in the scheduler's queue. `lost`: exited without recording its end. `unknown`: the
scheduler that may hold its job cannot be asked."""

STALE = 60.0
"""Seconds without a heartbeat before a run without a known holder counts as lost."""
ENDED = ("done", "failed", "preempted")
"""Recorded states that need no check of locks or heartbeat."""


@dataclass(frozen=True)
class RunStatus:
    """Current status of a run."""

    state: StatusName
    step: int
    reason: str | None
    attempt: int
    """Number of the last attempt; 0 before the first."""
    job_id: str | None = None

    @property
    def active(self) -> bool:
        """True if queued or running, or possibly so if unknown."""
        return self.state in ("queued", "running", "unknown")


def run_statuses(folders: Sequence[RunFolder]) -> dict[Path, RunStatus]:
    """Status of each run by folder path. Each executor is queried once, for all its unfinished runs."""
    statuses: dict[Path, RunStatus] = {}
    unsure: dict[str, list[RunFolder]] = {}
    for folder in folders:
        try:
            status, kind = _from_files(folder)
        except UserError as error:
            status, kind = RunStatus("unreadable", 0, str(error), 0), None
        statuses[folder.path] = status
        if kind is not None and status.state != "done":
            unsure.setdefault(kind, []).append(folder)
    for kind, of_kind in unsure.items():
        job_statuses = _job_statuses(kind, of_kind)
        for folder in of_kind:
            statuses[folder.path] = _merge(folder, statuses[folder.path], job_statuses.get(folder.path))
    return statuses


def run_status(folder: RunFolder) -> RunStatus:
    """Status of one run."""
    return run_statuses([folder])[folder.path]


def print_dry_run(executor: Executor, plan: RunPlan) -> None:
    """Print what submitting a run would do, and its job script; writes nothing."""
    folder, layout = plan.folder, plan.layout
    status = run_status(folder) if folder.path.exists() else None
    if status is None or status.state == "new":
        print(f"would start {folder.path}, {size_text(layout)}, to step {plan.experiment.training.last_step}")
    elif status.state == "done" or status.active:
        print(f"would start nothing: {folder.path} is {status.state}, after step {status.step}")
    else:
        print(f"would continue {folder.path}, {status.state} after step {status.step}, {size_text(layout)}")
    script = executor.script(plan)
    if script is not None:
        print(f"\n{script}", end="")


def count_states(states: Sequence[str]) -> str:
    """Format counts of states: `3 done, 1 failed`."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _from_files(folder: RunFolder) -> tuple[RunStatus, str | None]:
    """Status by files and locks, and the executor of the last attempt."""
    state = folder.read_state() or _state_of_attempts(folder)
    if state is None:
        return RunStatus("new", 0, None, 0), None
    attempts = folder.read_attempts() if state.state != "done" else []
    last = attempts[-1] if attempts else None
    kind, job_id = (trusted_executor(folder, last.launched_by), last.job_id) if last else (None, None)
    if state.state in ENDED:
        return RunStatus(state.state, state.step, state.reason, state.attempt, job_id), kind
    beat = folder.read_heartbeat()
    step = max(state.step, beat.step if beat and beat.time >= state.time else 0)
    if folder.holder() is not None:
        return RunStatus("running", step, None, state.attempt, job_id), kind
    if last is None:
        return RunStatus("new", 0, None, 0), kind
    age = time.time() - max(state.time, last.intent, beat.time if beat else 0.0)
    if last.hosts != (socket.gethostname(),) and age < STALE:  # locks are invisible across some network disks
        return RunStatus("running", step, None, state.attempt, job_id), kind
    return RunStatus("lost", step, _lost_reason(state, age), state.attempt, job_id), kind


def _state_of_attempts(folder: RunFolder) -> RunState | None:
    """Run state by the last attempt, if state.json was deleted; None before the first."""
    attempts = folder.read_attempts()
    if not attempts:
        return None
    last = attempts[-1]
    state = "running" if last.end is None else ENDED_STATES.get(last.exit, "failed")
    return RunState(state, 0, last.end or last.start or last.intent, last.attempt, last.reason)


def _lost_reason(state: RunState, age: float) -> str:
    if not state.attempt:
        return DIED_UNRECORDED
    return f"attempt {state.attempt} {DIED_UNRECORDED}; last heartbeat {format_duration(max(0, round(age)))} ago"


def _job_statuses(kind: str, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
    try:
        return executor_for(kind).status(folders)
    except UserError:
        return {}  # the executor's class is not importable here


def _merge(folder: RunFolder, status: RunStatus, job: JobStatus | None) -> RunStatus:
    """Merge the job status into the status from files."""
    if job is None:
        return status
    step, attempt, job_id = status.step, status.attempt, job.job_id or status.job_id
    if job.state == "unknown":
        rows = folder.read_attempts()
        if status.state in ENDED and rows and rows[-1].end is not None:
            return status
        beat = folder.read_heartbeat()
        last = (
            "" if beat is None else f"; last heartbeat {format_duration(round(beat.age))} ago, after step {beat.step}"
        )
        kind = rows[-1].launched_by if rows else "the scheduler"
        return RunStatus("unknown", step, f"{kind} cannot be asked: {job.reason}{last}", attempt, job_id)
    if job.state in ("queued", "running"):
        # Until a requeued run starts again, its files describe the previous attempt.
        return RunStatus(job.state, step, job.reason, attempt, job_id)
    if status.state in ("new", "running"):
        return RunStatus("lost", step, job.reason or "the scheduler ended or forgot its job", attempt, job_id)
    return RunStatus(status.state, step, status.reason or job.reason, attempt, job_id)
