"""SLURM behind the interface of backends: plan, then commit, then submit; nothing lost, nothing twice."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import JobStatus, Submission
from titan_exp.launch.provenance.code_snapshot import take_code_snapshot
from titan_exp.launch.provenance.provenance import Provenance, read_provenance
from titan_exp.launch.run_plan import RunPlan, create_run_folder, explain_write_errors, refresh_snapshot
from titan_exp.launch.slurm.epilogue import CANCELLED
from titan_exp.launch.slurm.squeue import Job, UnreachableError, accounted, ask, listed_jobs
from titan_exp.launch.slurm.submit import (
    FOLDER,
    Batch,
    RejectedError,
    UncertainError,
    grouped,
    is_being_submitted,
)
from titan_exp.launch.state.close_attempt import close_dead_attempts
from titan_exp.launch.state.thread_map import thread_map
from titan_exp.tracking.run_folder.attempts import Attempt
from titan_exp.tracking.run_folder.file_lock import FileLock, LockedError
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

SCANCEL_JOBS = 500
"""Jobs of one call of scancel."""
SUBMITTER_LIMIT = 120.0
"""Seconds to wait for another process that submits to the same folder of runs."""


class SlurmExecutor:
    """Runs as jobs of SLURM."""

    def submit(self, plans: Sequence[RunPlan], *, say: Callable[[str], None]) -> list[Submission]:
        """Submit what is not done, queued or running, and return at once; in the order of the plans.

        Raises:
            UserError: SLURM is not installed, this is a job itself, or the runs' folder cannot be written.
        """
        _require_slurm(plans)
        found: dict[Path, Submission] = {}
        for runs in dict.fromkeys(map(_runs, plans)):
            here = [plan for plan in plans if _runs(plan) == runs]
            with explain_write_errors(runs), _submitting(runs):
                for submission in _submit(runs, here, say):
                    found[submission.plan.folder.path] = submission
        return [found[plan.folder.path] for plan in plans]

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """What SLURM says of each run, by the folder's path; one question for all of them.

        A run that never was SLURM's is `gone`. Where SLURM cannot be asked it is `unknown`.
        """
        rows = {folder.path: _slurm_row(folder) for folder in folders}
        known = {path: row for path, row in rows.items() if row is not None}
        statuses = {
            path: JobStatus("gone", reason="it was never submitted to SLURM") for path in rows if path not in known
        }
        if not known:
            return statuses
        try:
            jobs = listed_jobs([(path / "attempts.jsonl").stat().st_uid for path in known])
        except UnreachableError as error:
            return statuses | {path: JobStatus("unknown", row.job_id, str(error)) for path, row in known.items()}
        matched = {path: _job_of(row, jobs) for path, row in known.items()}
        missing = [row.job_id for path, row in known.items() if matched[path] is None and row.job_id and not row.end]
        ends = accounted(missing)
        for path, row in known.items():
            statuses[path] = _job_status(row, matched[path], ends)
        return statuses

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """End runs that wait or run, those that run after saving; says of each, by its path, what was done.

        Returns at once: a job that does not end in cluster.stop_limit seconds is killed by its own script.
        """
        statuses, said = self.status(folders), {}
        queued: dict[str, RunFolder] = {}
        running: dict[str, RunFolder] = {}
        for folder in folders:
            status = statuses[folder.path]
            if status.state in ("gone", "unknown") or status.job_id is None:
                said[folder.path] = f"nothing done: {status.reason or status.state}"
                continue
            (queued if status.state == "queued" else running)[status.job_id] = folder
        for folder in running.values():
            folder.request_stop(f"{CANCELLED}: {reason}")
        failures = _scancel([], queued)
        # The script, not the ranks: it looks at the clock while they save.
        failures |= _scancel(["--batch", "--signal=USR2"], running)
        thread_map(lambda job: _dequeued(queued[job], reason), [job for job in queued if job not in failures])
        for job, folder in (queued | running).items():
            done = "taken out of the queue" if job in queued else "asked to save and stop"
            said[folder.path] = f"not cancelled: {failures[job]}" if job in failures else f"job {job}: {done}"
        return said


def _submit(runs: Path, plans: Sequence[RunPlan], say: Callable[[str], None]) -> Iterable[Submission]:
    frozen = take_code_snapshot(runs, [plan.experiment for plan in plans])
    for name in frozen.loose:
        say(f"{name} is in no repository of the current folder, so it is not frozen: edits count until the job starts.")
    provenance = read_provenance(frozen)
    were_there = thread_map(lambda plan: create_run_folder(plan, provenance), plans)
    there = {plan.folder.path for plan, was_there in zip(plans, were_there, strict=True) if was_there}
    statuses = SlurmExecutor().status([plan.folder for plan in plans if plan.folder.path in there])
    ready = []
    for plan in plans:
        before = _existing_submission(plan, statuses.get(plan.folder.path)) if plan.folder.path in there else None
        if before is not None:
            yield before
        elif (refusal := _make_ready(plan, provenance, renew=plan.folder.path in there)) is not None:
            yield refusal
        else:
            ready.append(plan)
    for group in grouped(ready):
        yield from _submit_group(Batch(runs, group, frozen))


def _existing_submission(plan: RunPlan, status: JobStatus | None) -> Submission | None:
    """What became of a run that needs no submission now; None where it needs one."""
    state, row = plan.folder.read_state(), _slurm_row(plan.folder)
    if state is not None and state.state == "done":
        return Submission(plan, "done", state and row and row.job_id)
    if status is None or row is None:
        return None
    if status.state in ("queued", "running"):
        if row.job_id is None:  # whoever submitted it died before sbatch answered
            plan.folder.update_attempt(row.attempt, job_id=status.job_id)
        return Submission(plan, "queued" if status.state == "queued" else "running", status.job_id, status.reason)
    if status.state == "unknown" and (row.end is None or row.exit == 85):
        return Submission(plan, "refused", row.job_id, f"SLURM cannot say whether it is queued: {status.reason}")
    if row.end is None and row.token is not None and is_being_submitted(_runs(plan), row.token):
        return Submission(plan, "refused", None, "an earlier submission of it still waits for SLURM: try again soon")
    return None


def _make_ready(plan: RunPlan, provenance: Provenance, *, renew: bool) -> Submission | None:
    """Close what died, and bring the snapshot up to date. Returns why that cannot be, where somebody holds the run."""
    folder = plan.folder
    try:
        lock = folder.claim("submission")
    except LockedError as error:
        return Submission(plan, "running", None, f"held by {error.holder or 'another process'}")
    with lock:
        if folder.ranks_alive():
            return Submission(plan, "running", None, f"held by {folder.holder() or 'its ranks'}")
        if renew:
            rows = folder.read_attempts()
            close_dead_attempts(folder)
            refresh_snapshot(plan, rows[-1].attempt if rows else 0, provenance)
    return None


def _submit_group(batch: Batch) -> Iterable[Submission]:
    batch.prepare()
    attempts = batch.intend()
    try:
        jobs = batch.submit()
    except RejectedError as error:
        for plan, attempt in zip(batch.plans, attempts, strict=True):
            plan.folder.update_attempt(attempt, end=time.time(), reason=f"not submitted: {error}")
            yield Submission(plan, "refused", None, str(error))
        return
    except UncertainError as error:
        for plan in batch.plans:
            yield Submission(plan, "refused", None, f"{error}; the same command asks whether there is a job")
        return
    yield from thread_map(_submitted, zip(batch.plans, attempts, jobs, strict=True))


def _submitted(made: tuple[RunPlan, int, str]) -> Submission:
    plan, attempt, job = made
    state = plan.folder.read_state()
    row = plan.folder.update_attempt(attempt, job_id=job)
    if state is not None and row.start is None and state.state != "pending":
        plan.folder.write_state(RunState("pending", state.step, time.time(), attempt, None))
    return Submission(plan, "submitted", job)


def _job_status(row: Attempt, job: Job | None, ends: Mapping[str, str]) -> JobStatus:
    if job is not None:
        words = str(job)
        match job.phase:
            case "queued":
                return JobStatus("queued", job.job_id, words)
            case "running":
                return JobStatus("running", job.job_id, words)
        return JobStatus("gone", job.job_id, row.reason or words)
    return JobStatus("gone", row.job_id, row.reason or ends.get(row.job_id or "") or "SLURM remembers no job of it")


def _job_of(row: Attempt, jobs: Sequence[Job]) -> Job | None:
    """The job of a row, the one that has not ended first; a job that continues another carries on its token."""
    mine = [job for job in jobs if (row.token and job.token == row.token) or (row.job_id == job.job_id)]
    return min(mine, key=lambda job: job.phase == "gone", default=None)


def _slurm_row(folder: RunFolder) -> Attempt | None:
    """The last start of a run, where it is SLURM's."""
    rows = folder.read_attempts()
    return rows[-1] if rows and rows[-1].launched_by == "slurm" else None


def _scancel(options: Sequence[str], jobs: Collection[str]) -> dict[str, str]:
    """Call scancel for many jobs at a time; returns those that it failed for, each with its words."""
    failures: dict[str, str] = {}
    names = list(jobs)
    for first in range(0, len(names), SCANCEL_JOBS):
        some = names[first : first + SCANCEL_JOBS]
        try:
            ask("scancel", *options, *some)
        except UnreachableError as error:
            alone = len(some) == 1 or error.silent
            failures |= dict.fromkeys(some, str(error)) if alone else _one_by_one(options, some)
    return failures


def _one_by_one(options: Sequence[str], jobs: Sequence[str]) -> dict[str, str]:
    """The same where scancel failed for some of them and does not say which."""
    failures: dict[str, str] = {}
    for job in jobs:
        try:
            ask("scancel", *options, job)
        except UnreachableError as error:
            failures[job] = str(error)
    return failures


def _dequeued(folder: RunFolder, reason: str) -> None:
    """Write down that a run was taken out of the queue."""
    row = _slurm_row(folder)
    if row is not None and row.start is None and row.end is None:
        folder.update_attempt(row.attempt, end=time.time(), reason=f"{CANCELLED}: {reason}")
    state = folder.read_state()
    if state is not None:
        # As if stopped while it ran: it is not lost, and the command that submitted it continues it.
        folder.write_state(RunState("preempted", state.step, time.time(), state.attempt, f"{CANCELLED}: {reason}"))


def _require_slurm(plans: Sequence[RunPlan]) -> None:
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if shutil.which(command) is None:
            raise UserError(
                f"cluster=slurm: {command} is not installed on this machine. Submit from a login node of the cluster, "
                "or run here with cluster=local."
            )
    inside = os.environ.get("SLURM_JOB_ID")
    if inside and not all(plan.experiment.cluster.submit_from_job for plan in plans):
        raise UserError(
            f"This is job {inside} of SLURM, and a job that submits jobs is mostly an accident. Submit from a login "
            "node, run here with cluster=local, or say that it is meant: cluster.submit_from_job=true."
        )


def _runs(plan: RunPlan) -> Path:
    return plan.folder.path.parents[1]


def _submitting(runs: Path) -> FileLock:
    """The right to submit to a folder of runs, held by one process at a time."""
    (runs / FOLDER).mkdir(parents=True, exist_ok=True)
    lock = FileLock(runs / FOLDER / "lock")
    try:
        lock.acquire("submission", timeout=SUBMITTER_LIMIT)
    except LockedError as error:
        raise UserError(f"{runs}: {error.holder or 'another process'} submits to it now. Wait for it.") from None
    return lock
