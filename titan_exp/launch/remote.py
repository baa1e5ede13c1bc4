"""Executors whose submitter, hosts and ranks share the folder of runs and nothing else.

`RemoteExecutor` is their common base, SLURM's included: preparation of a start, rendezvous of ranks, records of starts.
`QueueExecutor` serves a batch queue, and `HostsExecutor` hosts without a queue. Both run host agents, which manage the
ranks of a host as srun does in a job.
"""

import os
import shlex
import socket
import subprocess
import sys
import time
import uuid
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.attempt_end import AttemptResult, close_attempt, close_dead_attempts
from titan_exp.launch.code_snapshot import CodeSnapshot, take_code_snapshot
from titan_exp.launch.executor import NOT_CANCELLED, Executor, JobStatus, Submission, SubmitOptions, ask_to_stop
from titan_exp.launch.provenance import Provenance, read_provenance, report_changes, report_large_patch
from titan_exp.launch.rank import host_agent
from titan_exp.launch.rank.host_agent import AGENT, LOOPBACK, HostFile
from titan_exp.launch.rank.rank_env import HOSTS, IMPORT_PATH, TOKEN, RankInfo
from titan_exp.launch.run_plan import RunPlan, create_run_folder, explain_write_errors, refresh_snapshot
from titan_exp.launch.slurm.submit import thread_map
from titan_exp.tracking.run_folder.files import FileLock, LockedError
from titan_exp.tracking.run_folder.folder_owner import own_folder
from titan_exp.tracking.run_folder.run_folder import FAILED, STOPPED, Attempt, RunFolder, RunState, write_atomically

Result = TypeVar("Result")

SUBMITTER_LIMIT = 120.0  # seconds to wait while another submission uses the same folder of runs
FAILURES = (OSError, subprocess.SubprocessError, UserError)
"""Errors of a scheduler's or a host's commands that become the reason of a refusal."""


@dataclass(frozen=True)
class Job:
    """Job for one start of a run: a command on each of its nodes."""

    plan: RunPlan
    attempt: int
    """Number of the attempt."""
    token: str
    """Token that no other submission has."""
    snapshot: CodeSnapshot

    @property
    def name(self) -> str:
        """Name in a list of jobs."""
        return self.plan.job_name

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.plan.layout.nodes

    def command(self, node: int | str = 0) -> str:
        """Shell command of a node, a number from 0 or a shell expression such as `$PBS_NODENUM`. It ends with the
        node's ranks, with their exit code: 0 done, 85 saved and stopped, any other failed."""
        cluster, folder = self.plan.experiment.cluster, self.plan.folder
        switches = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE")
        # The code is as it was at submission.
        variables = {"PYTHONPATH": self.snapshot.package, IMPORT_PATH: ":".join(self.snapshot.import_path())}
        variables |= {**dict.fromkeys(switches, "1"), **cluster.environment}
        python = [cluster.python or sys.executable, "-m", AGENT, str(folder.path), str(self.attempt)]
        words = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *python])
        log = shlex.quote(str(folder.attempt_logs(self.attempt) / "host-"))
        return f"{words} {node} >> {log}{node}.log 2>&1 < /dev/null"


class RemoteExecutor(Executor):
    """Executor for other machines: ranks meet at an address that rank 0 writes into the attempt's logs."""

    scheduler: ClassVar[str] = "scheduler"
    """Name in texts for users, and name of the folder, inside a folder of runs, with this user's submissions."""

    @abstractmethod
    def start_run(self, plan: RunPlan, snapshot: CodeSnapshot) -> Submission:
        """Start a run whose folder is ready, without waiting for it. A UserError becomes a refusal.

        `record_intent` comes before the job exists, and `record_submitted` follows it.
        """

    def start_runs(self, plans: Sequence[RunPlan], snapshot: CodeSnapshot) -> Iterable[Submission]:
        """Start several runs in one folder of runs."""
        return (_explained(plan, partial(self.start_run, plan, snapshot)) for plan in plans)

    def existing(self, plan: RunPlan, status: JobStatus | None, snapshot: CodeSnapshot) -> Submission | None:
        """Result of a run that needs no start; None if it must be started."""
        state, row = plan.folder.read_state(), self.attempt(plan.folder)
        if state is not None and state.state == "done":
            return Submission(plan, "done", row and row.job_id)
        if status is None or row is None:
            return None
        if status.state in ("queued", "running"):
            if row.job_id is None:  # the submitter was killed before it recorded the id
                plan.folder.update_attempt(row.attempt, job_id=status.job_id)
            return Submission(plan, "queued" if status.state == "queued" else "running", status.job_id, status.reason)
        if status.state == "unknown" and (row.end is None or row.exit == STOPPED):
            why = f"{self.scheduler} does not answer, and the run may be in its queue: {status.reason}"
            return Submission.refused(plan, why, row.job_id)
        return None

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        found: dict[Path, Submission] = {}
        for runs in dict.fromkeys(plan.runs for plan in plans):
            here = [plan for plan in plans if plan.runs == runs]
            with explain_write_errors(runs), self.submitting(runs):
                for submission in self._submit(runs, here, options):
                    found[submission.plan.folder.path] = submission
        return [found[plan.folder.path] for plan in plans]

    def script(self, plan: RunPlan) -> str:
        """Command of each node."""
        job = self.planned_job(plan)
        return "".join(f"# node {node}\n{job.command(node)}\n" for node in range(job.nodes))

    def planned_job(self, plan: RunPlan) -> Job:
        """Next job of a run, for `script`; writes nothing."""
        rows = plan.folder.read_attempts() if plan.folder.path.exists() else []
        snapshot = take_code_snapshot(plan.runs, [plan.experiment], write=False)
        return Job(plan, rows[-1].attempt + 1 if rows else 1, "TOKEN", snapshot)

    def rank_info(self) -> RankInfo | None:
        """Rank that a host agent started; None under another launcher."""
        env = os.environ
        if HOSTS not in env:
            return None
        rank, size, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return RankInfo(rank, size, local, hosts=tuple(env[HOSTS].split(",")), token=env[TOKEN])

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        """Write rank 0's address into the attempt's logs: its machine's name, or the loopback interface of one host."""
        address = LOOPBACK if len(rank.hosts) == 1 else socket.gethostname()
        host_agent.publish_address(folder, rank, address, zlib.crc32((rank.job_id or rank.token or "").encode()))

    def join_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        host_agent.join_rendezvous(folder, rank)

    def attempt(self, folder: RunFolder) -> Attempt | None:
        """Last attempt of a run if this executor submitted it, else None."""
        rows = folder.read_attempts()
        return rows[-1] if rows and rows[-1].launched_by == self.kind else None

    def look(self, rows: Mapping[RunFolder, Attempt]) -> Mapping[Path, JobStatus]:
        """Job status by run folder path, for this executor's attempts that have not ended."""
        return {}

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Job status by run folder path. A run that gives signs of life is running, whatever the scheduler says."""
        rows = {folder: row for folder in folders if (row := self.attempt(folder)) is not None}
        waiting = {folder: row for folder, row in rows.items() if row.end is None}
        found = {folder.path: JobStatus("gone", row.job_id, row.reason) for folder, row in rows.items() if row.end}
        found |= self.look(waiting)
        for folder, row in waiting.items():
            status = found.get(folder.path)
            if (status is None or status.state in ("gone", "unknown")) and is_alive(folder, row):
                found[folder.path] = JobStatus("running", row.job_id)
        return found

    def record_intent(self, plan: RunPlan, snapshot: CodeSnapshot, hosts: Sequence[str] = ()) -> Job:
        """Record an attempt before its submission, and clear an earlier stop request."""
        folder, token = plan.folder, uuid.uuid4().hex[:12]
        folder.clear_stop()
        size = plan.layout.world_size
        number = folder.add_attempt(world_size=size, hosts=hosts, launched_by=self.kind, token=token).attempt
        folder.make_attempt_logs(number)
        return Job(plan, number, token, snapshot)

    def record_submitted(self, plan: RunPlan, attempt: int, job_id: str) -> Submission:
        """Record the job of an attempt, which may have begun meanwhile."""
        state = plan.folder.read_state()
        row = plan.folder.update_attempt(attempt, job_id=job_id)
        if state is not None and row.start is None and state.state != "pending":
            plan.folder.write_state(RunState("pending", state.step, time.time(), attempt, None))
        return Submission(plan, "submitted", job_id)

    def record_dequeued(self, folder: RunFolder, reason: str) -> None:
        """Close the attempt of a job that was removed from the queue."""
        row, state = self.attempt(folder), folder.read_state()
        if row is not None and row.start is None and row.end is None:
            folder.update_attempt(row.attempt, end=time.time(), reason=reason)
        if state is not None:
            # `preempted`, not `lost`: the same command continues the run.
            folder.write_state(RunState("preempted", state.step, time.time(), state.attempt, reason))

    def submissions(self, runs: Path) -> Path:
        """Folder of this user's submissions inside a folder of runs, which several users may share."""
        return runs / f".{self.scheduler.lower()}-{os.geteuid()}"

    def submitting(self, runs: Path) -> FileLock:
        """Acquire the lock of this user's submissions to a folder of runs. Raises UserError if another has it."""
        lock = FileLock(own_folder(self.submissions(runs)) / "lock")
        try:
            lock.acquire("submission", timeout=SUBMITTER_LIMIT)
        except LockedError as error:
            who = error.holder or "another process"
            raise UserError(f"{runs}: {who} is submitting to this folder. Wait for it.") from None
        return lock

    def _submit(self, runs: Path, plans: Sequence[RunPlan], options: SubmitOptions) -> Iterator[Submission]:
        snapshot = take_code_snapshot(runs, [plan.experiment for plan in plans])
        for line in snapshot.notes():
            options.echo(line)
        provenance = read_provenance(snapshot)
        existed = thread_map(lambda plan: _explained(plan, partial(create_run_folder, plan, provenance)), plans)
        for plan in [plan for plan, there in zip(plans, existed, strict=True) if there is False][:1]:
            report_large_patch(plan.folder, options.echo)  # all plans have the same folder
        statuses = self.status([plan.folder for plan, there in zip(plans, existed, strict=True) if there is True])
        ready = []
        for plan, there in zip(plans, existed, strict=True):
            found = there if isinstance(there, Submission) else None
            if there is True:
                found = self.existing(plan, statuses.get(plan.folder.path), snapshot)
            if found is None:
                found = _explained(plan, partial(make_ready, plan, provenance, renew=there is True))
            if found is None:
                ready.append(plan)
            else:
                yield found
        report_changes(ready, options.echo)
        yield from self.start_runs(ready, snapshot)


class QueueExecutor(RemoteExecutor):
    """Batch queue: submits runs as jobs, which run a host agent on each node."""

    scheduler = "queue"

    @abstractmethod
    def enqueue(self, options: Any, job: Job) -> str:
        """Queue a job; returns its id, which no other job has. Raises OSError, subprocess.SubprocessError or UserError
        if the queue does not take it."""

    @abstractmethod
    def jobs(self, options: Any, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Status by id of `queued` and `running` jobs, with a reason for waiting. Jobs that are left out are gone. No
        ids ask whether the queue answers. Raises OSError, subprocess.SubprocessError or UserError if it does not."""

    @abstractmethod
    def dequeue(self, options: Any, job_id: str) -> bool:
        """Remove a waiting job from the queue. Returns False if it already runs; it is then asked to save and stop.
        Raises OSError, subprocess.SubprocessError or UserError if the queue does not answer."""

    def require(self, plans: Sequence[RunPlan]) -> None:
        found = [self.options(plan.experiment.cluster) for plan in plans]
        for options in {repr(options): options for options in found}.values():
            try:
                self.jobs(options, [])
            except FAILURES as error:
                what = f"the {self.scheduler} does not answer, so we submit nothing: {said(error)}"
                remedy = "Type the same command again once it answers, or run here with cluster=local"
                raise UserError(f"cluster.kind={self.kind}: {what}. {remedy}.") from None

    def start_run(self, plan: RunPlan, snapshot: CodeSnapshot) -> Submission:
        job = self.record_intent(plan, snapshot)
        try:
            job_id = self.enqueue(self.options(plan.experiment.cluster), job)
        except FAILURES as error:
            # If a job exists all the same, it starts nothing, because its attempt has ended.
            plan.folder.update_attempt(job.attempt, end=time.time(), reason=f"not submitted: {said(error)}")
            return Submission.refused(plan, said(error))
        return self.record_submitted(plan, job.attempt, job_id)

    def look(self, rows: Mapping[RunFolder, Attempt]) -> Mapping[Path, JobStatus]:
        """Job status, with one query for all runs that have the same options."""
        found: dict[Path, JobStatus] = {}
        asked: dict[str, tuple[Any, dict[Path, str]]] = {}
        for folder, row in rows.items():
            try:
                options = self.options_of(folder)
            except UserError as error:  # its options no longer fit the class
                found[folder.path] = JobStatus("unknown", row.job_id, str(error))
            else:
                asked.setdefault(repr(options), (options, {}))[1][folder.path] = row.job_id or ""
        for options, ids in asked.values():
            answers, missing = {}, JobStatus("gone", reason="the queue has no job of this run")
            try:
                answers = self.jobs(options, list(filter(None, ids.values())))
            except FAILURES as error:
                missing = JobStatus("unknown", reason=said(error))
            found |= {path: replace(answers.get(job_id, missing), job_id=job_id) for path, job_id in ids.items()}
        return found

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        statuses, lines = self.status(folders), {}
        for folder in folders:
            status = statuses.get(folder.path, JobStatus("gone"))
            try:
                if status.state == "unknown":
                    raise UserError(f"{self.scheduler} does not answer: {status.reason}")
                if status.state == "queued" and self.dequeue(self.options_of(folder), status.job_id or ""):
                    self.record_dequeued(folder, reason)
                    lines[folder.path] = f"job {status.job_id}: taken out of the queue"
                else:
                    lines[folder.path] = ask_to_stop(folder, status, reason)
            except FAILURES as error:
                lines[folder.path] = f"{NOT_CANCELLED}: {said(error)}"
        return lines


class HostsExecutor(RemoteExecutor):
    """Named hosts without a scheduler; each host's command runs a host agent."""

    scheduler = "hosts"

    @abstractmethod
    def hosts(self, options: Any) -> Sequence[str]:
        """Names of the hosts; a run uses the first ones, one per node."""

    @abstractmethod
    def start(self, options: Any, host: str, command: str) -> None:
        """Run a shell command on a host. It returns at once there and leaves its process in the background. Raises
        OSError or subprocess.SubprocessError if the host cannot be reached, or the command fails."""

    def require(self, plans: Sequence[RunPlan]) -> None:
        """Check that each run has enough hosts. Raises UserError."""
        for plan in plans:
            self._hosts(plan)

    def script(self, plan: RunPlan) -> str:
        job = self.planned_job(plan)
        return "".join(f"# {host}\n{_detached(job, node)}\n" for node, host in enumerate(self._hosts(plan)))

    def look(self, rows: Mapping[RunFolder, Attempt]) -> Mapping[Path, JobStatus]:
        """Job status: `queued` while the agents of all hosts may still appear."""
        found = {}
        for folder, row in rows.items():
            awaited = [HostFile(folder, row.attempt, node).awaited(row.intent) for node in range(len(row.hosts))]
            lost = JobStatus("gone", row.job_id, "its host agents are gone")
            found[folder.path] = JobStatus("queued", row.job_id) if all(awaited) else lost
        return found

    def start_run(self, plan: RunPlan, snapshot: CodeSnapshot) -> Submission:
        """Start the agent of each host. Refuses a run if one of its hosts has another run."""
        hosts, options = self._hosts(plan), self.options(plan.experiment.cluster)
        for host in hosts:
            if (other := self._run_on(plan.runs, host)) is not None:
                name = "/".join(other.path.parts[-2:])
                return Submission.refused(plan, f"{host} runs {name}. Type the same command again when that has ended")
        job = self.record_intent(plan, snapshot, hosts)
        submission = self.record_submitted(plan, job.attempt, job.token)
        for node, host in enumerate(hosts):
            note = self.submissions(plan.runs) / _note(host)
            where = [*plan.folder.path.parts[-2:], str(job.attempt), str(node)]
            write_atomically(note, "\n".join(where), durable=False)
            try:
                self.start(options, host, _detached(job, node))
            except FAILURES as error:
                reason = f"cannot start {host}: {said(error)}"
                # The agents of other hosts end as they see it.
                close_attempt(plan.folder, job.attempt, AttemptResult("failed", FAILED, reason))
                return Submission(plan, "failed", job.token, reason, FAILED)
        return submission

    def _run_on(self, runs: Path, host: str) -> RunFolder | None:
        """Run, by any user of this folder of runs, whose agent is on a host or expected there."""
        for note in runs.glob(f".{self.scheduler}-*/{_note(host)}"):
            name, run_id, attempt, node = note.read_text(encoding="utf-8").split("\n")
            folder = RunFolder(runs / name / run_id)
            rows = [row for row in folder.read_attempts() if row.attempt == int(attempt)]
            agent = HostFile(folder, int(attempt), int(node))
            if agent.alive or any(row.end is None and agent.awaited(since=row.intent) for row in rows):
                return folder
        return None

    def _hosts(self, plan: RunPlan) -> list[str]:
        known, nodes = list(dict.fromkeys(self.hosts(self.options(plan.experiment.cluster)))), plan.layout.nodes
        if len(known) < nodes:
            named = f"{len(known) or 'no'} host{'s' * (len(known) != 1)}"
            needs = f"This run needs {plan.size}, and cluster.options names {named}"
            raise UserError(f"{needs}. Name more, or choose fewer processes.")
        return known[:nodes]


def make_ready(plan: RunPlan, provenance: Provenance, *, renew: bool) -> Submission | None:
    """Prepare a run's folder for an attempt; `renew` an existing one. Returns a result if another process has it."""
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


def is_alive(folder: RunFolder, row: Attempt) -> bool:
    """True if an attempt gives signs of life: a lock, its host agents, or a heartbeat, since locks may be invisible."""
    files = folder.attempt_logs(row.attempt).glob("host-" + "[0-9]" * 5)
    agents = [HostFile(folder, row.attempt, int(file.name.rpartition("-")[2])) for file in files]
    if folder.ranks_alive() or any(agent.alive for agent in agents):
        return True
    if agents or row.hosts == (socket.gethostname(),):
        return False
    beat = folder.read_heartbeat()
    return beat is not None and beat.time >= row.intent and beat.age < host_agent.SILENCE


def said(error: Exception) -> str:
    """Message about a failed command: its own output if it printed any."""
    printed = getattr(error, "stderr", None) or b""
    return (printed.decode(errors="replace") if isinstance(printed, bytes) else printed).strip() or str(error)


def _explained(plan: RunPlan, act: Callable[[], Result]) -> Result | Submission:
    """Result of `act`; a UserError or a failed write becomes a refusal."""
    try:
        with explain_write_errors(plan.folder.path):
            return act()
    except UserError as error:
        return Submission.refused(plan, str(error))


def _detached(job: Job, node: int) -> str:
    return f"setsid nohup {job.command(node)} &"


def _note(host: str) -> str:
    return f"host-{quote(host, safe='')}"
