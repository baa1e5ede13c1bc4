"""SLURM executor: sbatch to submit, squeue and sacct for status, scancel to cancel.

The intent is recorded before submission, so no job is lost or submitted twice.
"""

import os
import shutil
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.code_snapshot import CodeSnapshot, take_code_snapshot
from titan_exp.launch.executor import NOT_CANCELLED, JobStatus, Submission, SubmitOptions, several_worlds
from titan_exp.launch.rank.host_agent import LOOPBACK, publish_address
from titan_exp.launch.rank.rank_env import GROUP, TOKEN, RankInfo, forget_torchrun
from titan_exp.launch.remote import RemoteExecutor
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.slurm.epilogue import CANCELLED
from titan_exp.launch.slurm.squeue import Job, UnreachableError, accounted, ask, listed_jobs
from titan_exp.launch.slurm.submit import Batch, SbatchError, group_by_resources, is_being_submitted, thread_map
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder


def srun_rank() -> RankInfo | None:
    """Rank from srun's environment; None without srun, or under torchrun by hand. In a submitted job srun counts, even
    if a hook of the container runtime or the submitting shell has set RANK."""
    env = os.environ
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or (TOKEN not in env and "RANK" in env):
        return None
    from submitit.slurm.slurm import SlurmJobEnvironment

    token, visible = env.get(TOKEN), env.get("CUDA_VISIBLE_DEVICES", "")
    return RankInfo(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]),
        # With GPU binding per task, a task sees one GPU, as device 0.
        local_rank=0 if visible and "," not in visible else int(env.get("SLURM_LOCALID", "0")),
        job_id=slurm_job_id() if token is not None else f"{slurm_job_id()}.{env['SLURM_STEP_ID']}",
        hosts=tuple(SlurmJobEnvironment().hostnames),
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        token=token,
        gang=True,
        by_hand="srun --ntasks {} python",
    )


def slurm_job_id() -> str:
    """Job id of this process; `ARRAY_TASK` for an array task, whose SLURM_JOB_ID may be the array's."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def publish_rendezvous(folder: RunFolder, rank: RankInfo, host: str | None = None) -> None:
    """Write rank 0's address and links to the rank logs into the log folder of the attempt, or of a world. The address
    is `host`, or the loopback interface if there is one node, else the node's name."""
    assert rank.attempt is not None
    address = host or (LOOPBACK if os.environ.get("SLURM_STEP_NUM_NODES") == "1" else socket.gethostname())
    publish_address(folder, rank, address, int(os.environ["SLURM_JOB_ID"]))
    logs = folder.attempt_logs(rank.attempt)
    for number in range(rank.world_size):
        link = logs / f"rank-{number:05d}.log"
        if rank.token is not None and not link.is_symlink():
            up = Path(*[".."] * len(logs.relative_to(folder.logs).parts))
            link.symlink_to(up / f"slurm-{rank.job_id}-{rank.restarts}-rank-{number:05d}.log")


SCANCEL_JOBS = 500


class SlurmExecutor(RemoteExecutor):
    """Submits runs as SLURM jobs; runs with equal resources form a job array."""

    scheduler = "SLURM"

    def require(self, plans: Sequence[RunPlan]) -> None:
        """Check that SLURM is installed and answers, and that this is not inside a job. Raises UserError."""
        self._require_login_node(plans)
        try:
            listed_jobs([os.geteuid()])
        except UnreachableError as error:
            remedy = "Type the same command again once it answers, submit from a login node of the cluster, or run here"
            what = f"cluster=slurm: SLURM does not answer, so we submit nothing: {error}"
            raise UserError(f"{what}. {remedy} with cluster=local.") from None

    def _require_login_node(self, plans: Sequence[RunPlan]) -> None:
        for command in ("sbatch", "srun", "squeue", "scancel"):
            if shutil.which(command) is None:
                remedy = "Submit from a login node of the cluster, or run here with cluster=local."
                raise UserError(f"cluster=slurm: {command} is not installed on this machine. {remedy}")
        inside = os.environ.get("SLURM_JOB_ID")
        if inside and not all(plan.experiment.cluster.submit_from_job for plan in plans):
            what = f"This process is inside SLURM job {inside}, and jobs that submit jobs are usually a mistake"
            remedy = "Submit from a login node, run here with cluster=local, or set cluster.submit_from_job=true"
            raise UserError(f"{what}. {remedy}.")

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        self._require_login_node(plans)
        return super().submit(plans, options)

    def start_runs(self, plans: Sequence[RunPlan], snapshot: CodeSnapshot) -> Iterable[Submission]:
        for group in group_by_resources(plans):
            yield from _submit_group(self, Batch(plans[0].runs, group, snapshot))

    def start_run(self, plan: RunPlan, snapshot: CodeSnapshot) -> Submission:
        (submission,) = self.start_runs([plan], snapshot)
        return submission

    def script(self, plan: RunPlan) -> str:
        """Batch script of a run, with TOKEN in place of the submission's token."""
        snapshot = take_code_snapshot(plan.runs, [plan.experiment], write=False)
        return Batch(plan.runs, [plan], snapshot, token="TOKEN").text

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Job status by run folder path, in one query: `gone` if another executor submitted the last attempt."""
        rows = {folder.path: row for folder in folders if (row := self.attempt(folder)) is not None}
        statuses = {folder.path: JobStatus("gone", reason="never submitted to SLURM") for folder in folders}
        if not rows:
            return statuses
        try:
            jobs = listed_jobs([(path / "attempts.jsonl").stat().st_uid for path in rows])
        except UnreachableError as error:
            return statuses | {path: JobStatus("unknown", row.job_id, str(error)) for path, row in rows.items()}
        live = [job for job in jobs if job.phase != "gone"]
        for path, row in rows.items():
            if worlds := [job for job in live if row.token and job.token.rpartition("_")[0] == row.token]:
                statuses[path] = _status_of_worlds(worlds)
        single = {path: row for path, row in rows.items() if not statuses[path].jobs}
        found = {path: _job_of(row, jobs) for path, row in single.items()}
        ends = accounted([row.job_id for path, row in single.items() if not found[path] and row.job_id and not row.end])
        return statuses | {path: _job_status(row, found[path], ends) for path, row in single.items()}

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """Remove queued jobs and request save-and-stop of active ones; returns a message per folder path. A script
        kills its job if that does not end within cluster.stop_limit seconds."""
        statuses, lines = self.status(folders), {}
        queued: dict[str, RunFolder] = {}
        running: dict[str, RunFolder] = {}
        for folder in folders:
            status = statuses[folder.path]
            if status.state == "unknown":
                line = f"SLURM does not answer: {status.reason}. Type the same command again when it does"
                lines[folder.path] = f"{NOT_CANCELLED}: {line}"
                continue
            if status.state == "gone" or status.job_id is None:
                lines[folder.path] = f"nothing to do: {status.reason or status.state}"
                continue
            for job, state in (status.jobs or {status.job_id: status.state}).items():
                (queued if state == "queued" else running)[job] = folder
        active = {folder.path: folder for folder in running.values()}
        for folder in active.values():
            folder.request_stop(f"{CANCELLED}: {reason}")
        failures = _scancel([], queued)
        # Signal the batch script, not the ranks: it enforces cluster.stop_limit while they save.
        failures |= _scancel(["--batch", "--signal=USR2"], running)
        removed = [job for job in queued if job not in failures and queued[job].path not in active]
        thread_map(lambda job: self.record_dequeued(queued[job], f"{CANCELLED}: {reason}"), removed)
        for job, folder in (queued | running).items():
            if job in running:  # the ranks read the request, signal or not
                unsent = f", but SLURM will not enforce cluster.stop_limit: {failures[job]}" if job in failures else ""
                line = f"job {job}: asked to save and stop{unsent}"
            else:
                line = f"{NOT_CANCELLED}: {failures[job]}" if job in failures else f"job {job}: taken out of the queue"
            lines[folder.path] = "; ".join(filter(None, [lines.get(folder.path), line]))
        return lines

    def rank_info(self) -> RankInfo | None:
        rank = srun_rank()
        if rank is not None:
            forget_torchrun()
        return rank

    def join_world(self, folder: RunFolder, rank: RankInfo) -> tuple[RunFolder, RankInfo] | None:
        number = os.environ.get(GROUP)
        return None if number is None or rank.token is None else several_worlds().join(folder, rank, int(number))

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        publish_rendezvous(folder, rank)

    def existing(self, plan: RunPlan, status: JobStatus | None, snapshot: CodeSnapshot) -> Submission | None:
        """Result of a run that needs no submission, or of submitting worlds that had no job; None if the run must be
        submitted."""
        found, row = super().existing(plan, status, snapshot), self.attempt(plan.folder)
        token = None if row is None or row.end is not None else row.token
        if token is None:
            return found
        asks = found is None or (status is not None and bool(status.jobs))
        waits = asks and is_being_submitted(plan.runs, token)
        if found is None and waits:
            why = "an earlier submission of this run still waits for SLURM, so try again soon"
            return Submission.refused(plan, why)
        jobs = {} if found is None or status is None or waits else status.jobs
        present = {int(job.rpartition("_")[2]) for job in jobs}
        missing = [number for number in range(plan.layout.cluster.worlds) if jobs and number not in present]
        return _submit_missing(Batch(plan.runs, [plan], snapshot, token, missing), missing) if missing else found


def _submit_group(slurm: SlurmExecutor, batch: Batch) -> Iterable[Submission]:
    batch.prepare()
    attempts = batch.record_intent()
    try:
        jobs = batch.submit()
    except SbatchError as error:
        # sbatch may have made the job and failed afterwards, as happens when the controller answers late.
        statuses = slurm.status([plan.folder for plan in batch.plans])
        for plan, attempt in zip(batch.plans, attempts, strict=True):
            status = statuses[plan.folder.path]
            if status.job_id is not None:
                yield slurm.record_submitted(plan, attempt, status.job_id)
            elif error.refusal and status.state == "gone":
                plan.folder.update_attempt(attempt, end=time.time(), reason=f"not submitted: {error}")
                yield Submission.refused(plan, error.refusal)
            else:
                yield Submission.refused(plan, f"{error}. Type the same command again to ask SLURM for the job")
        return
    yield from thread_map(lambda each: slurm.record_submitted(*each), zip(batch.plans, attempts, jobs, strict=True))


def _submit_missing(batch: Batch, numbers: Sequence[int]) -> Submission:
    """Submit jobs of missing worlds; their attempt is already recorded, and their comments have its token."""
    batch.prepare()
    (plan,) = batch.plans
    groups = ", ".join(map(str, numbers))
    try:
        (job,) = batch.submit()
    except SbatchError as error:
        return Submission.refused(plan, f"groups {groups}: {error}")
    return Submission(plan, "submitted", job, f"only groups {groups}, which had no job")


def _job_status(row: Attempt, job: Job | None, ends: Mapping[str, str]) -> JobStatus:
    if job is not None and job.phase != "gone":
        return JobStatus("queued" if job.phase == "queued" else "running", job.job_id, str(job))
    text = str(job) if job else ends.get(row.job_id or "") or "SLURM has no job of this run"
    if row.start is None and text.startswith("completed"):
        # slurmd reports a script that it could not execute as completed.
        text = "its job ended before the run started (the log of slurmd on its first node says why)"
    return JobStatus("gone", row.job_id if job is None else job.job_id, row.reason or text)


def _status_of_worlds(jobs: Sequence[Job]) -> JobStatus:
    states = {job.job_id: "queued" if job.phase == "queued" else "running" for job in jobs}
    state = "running" if "running" in states.values() else "queued"
    noun = several_worlds().noun
    waiting = [f"{noun} {job.job_id.rpartition('_')[2]} {job}" for job in jobs if job.phase == "queued"]
    job_id = ",".join(dict.fromkeys(job.partition("_")[0] for job in states))
    return JobStatus(state, job_id, "; ".join(waiting) or None, states)


def _job_of(row: Attempt, jobs: Sequence[Job]) -> Job | None:
    """Job of an attempt, preferably one that has not ended; chained jobs share the token."""
    own = [job for job in jobs if (row.token and job.token == row.token) or (row.job_id == job.job_id)]
    return min(own, key=lambda job: job.phase == "gone", default=None)


def _scancel(options: Sequence[str], jobs: Collection[str], at_once: int = SCANCEL_JOBS) -> dict[str, str]:
    """Call scancel for many jobs at a time; returns error messages by job id. scancel does not report which job failed,
    so a failed call is repeated job by job."""
    failures: dict[str, str] = {}
    names = list(jobs)
    for first in range(0, len(names), at_once):
        chunk = names[first : first + at_once]
        try:
            ask("scancel", *options, *chunk)
        except UnreachableError as error:
            final = len(chunk) == 1 or error.silent
            failures |= dict.fromkeys(chunk, str(error)) if final else _scancel(options, chunk, at_once=1)
    return failures
