"""Executors whose submitter, hosts and ranks share the folder of runs and nothing else.

`RemoteExecutor` has what each of them needs, SLURM's too. `HostsExecutor` needs no scheduler: it starts a command on
every host, the host agent, which does for the ranks what srun does in a job.
"""

import shlex
import socket
import subprocess
import sys
import time
import uuid
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, JobStatus, Submission, SubmitOptions
from titan_exp.launch.provenance.changes import report_changes, report_large_patch
from titan_exp.launch.provenance.code_snapshot import CodeSnapshot, take_code_snapshot
from titan_exp.launch.provenance.provenance import Provenance, read_provenance
from titan_exp.launch.rank.host_agent import AGENT, HostFile, hosts_rank
from titan_exp.launch.rank.join_attempt import LOOPBACK, join_rendezvous, publish_address
from titan_exp.launch.rank.rank_env import IMPORT_PATH, RankInfo
from titan_exp.launch.run_plan import RunPlan, create_run_folder, explain_write_errors, refresh_snapshot
from titan_exp.launch.state.attempt_end import close_attempt, close_dead_attempts
from titan_exp.tracking.run_folder.attempts import FAILED, Attempt
from titan_exp.tracking.run_folder.files import LockedError
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState


class RemoteExecutor(Executor):
    """Executor of other machines: ranks meet at an address that rank 0 writes into the attempt's logs."""

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        """Write rank 0's address into the attempt's log folder: the name of its machine, on one host the loopback
        interface."""
        address = LOOPBACK if len(rank.hosts) == 1 else socket.gethostname()
        publish_address(folder, rank, address, zlib.crc32(rank.job_id.encode()))

    def join_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        """Set MASTER_ADDR and MASTER_PORT to rank 0's address."""
        join_rendezvous(folder, rank)

    def attempt(self, folder: RunFolder) -> Attempt | None:
        """Last attempt of a run if this executor submitted it, else None."""
        rows = folder.read_attempts()
        return rows[-1] if rows and rows[-1].launched_by == self.kind else None


def make_ready(plan: RunPlan, provenance: Provenance, *, renew: bool) -> Submission | None:
    """Make the folder of a run ready for another attempt: with `renew`, for one that existed, close attempts without an
    end and refresh the snapshot. Returns a result if another process holds the run."""
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


def runs_of(plan: RunPlan) -> Path:
    """Folder of the runs of all experiments."""
    return plan.folder.path.parents[1]


class HostsExecutor(RemoteExecutor):
    """Runs on named hosts without a scheduler. The command of a host starts its ranks, ends them with those of other
    hosts, and closes the attempt if they cannot."""

    @abstractmethod
    def hosts(self, options: Any) -> Sequence[str]:
        """Names of the hosts; a run takes the first ones, as many as it has nodes."""

    @abstractmethod
    def start(self, options: Any, host: str, command: str) -> None:
        """Run a shell command on a host. It returns at once there and leaves its process in the background.

        Raises OSError or subprocess.SubprocessError if the host cannot be reached, or the command fails.
        """

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Start runs that are not done or running, without waiting for them; one of several on the same host is started
        and the others are refused."""
        results: list[Submission] = []
        taken: dict[str, RunPlan] = {}
        for plan in plans:
            if options.stop_requested():
                results.append(Submission(plan, "not started", exit_code=130))
                continue
            try:
                with explain_write_errors(plan.folder.path):
                    results.append(self._submit(plan, taken, options))
            except UserError as error:
                results.append(Submission(plan, "refused", reason=str(error), exit_code=error.exit_code))
        return results

    def script(self, plan: RunPlan) -> str:
        """Command of each host."""
        snapshot = take_code_snapshot(runs_of(plan), [plan.experiment], write=False)
        rows = plan.folder.read_attempts() if plan.folder.path.exists() else []
        hosts, number = self._hosts(plan), rows[-1].attempt + 1 if rows else 1
        return "".join(f"# {host}\n{_command(plan, snapshot, number, index)}\n" for index, host in enumerate(hosts))

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Status by the signs of life of the host agents, in the attempt's logs."""
        found = {}
        for folder in folders:
            row = self.attempt(folder)
            if row is not None and row.end is None:
                agents = [HostFile(folder, row.attempt, index) for index in range(len(row.hosts))]
                state = "running" if any(agent.alive for agent in agents) else "gone"
                if state == "gone" and all(agent.awaited(since=row.intent) for agent in agents):
                    state = "queued"
                found[folder.path] = JobStatus(
                    state, row.job_id, None if state != "gone" else "its host agents are gone"
                )
        return found

    def rank_info(self) -> RankInfo | None:
        """Rank that a host agent started; None under another launcher."""
        return hosts_rank()

    def _submit(self, plan: RunPlan, taken: dict[str, RunPlan], options: SubmitOptions) -> Submission:
        folder, hosts = plan.folder, self._hosts(plan)
        existed = folder.path.exists()
        state = folder.read_state() if existed else None
        if state is not None and state.state == "done":
            return Submission(plan, "done")
        status = self.status([folder]).get(folder.path) if existed else None
        if status is not None and status.state in ("queued", "running"):
            return Submission(plan, status.state, status.job_id, "left alone")
        if (other := next((taken[host] for host in hosts if host in taken), None)) is not None:
            reason = (
                f"{options.title(other)} was just started on {', '.join(hosts)}; type the same command when it ends"
            )
            return Submission(plan, "refused", reason=reason, exit_code=UserError.exit_code)
        snapshot = take_code_snapshot(runs_of(plan), [plan.experiment])
        provenance = read_provenance(snapshot)
        existed = create_run_folder(plan, provenance)
        if (busy := make_ready(plan, provenance, renew=existed)) is not None:
            return busy
        for line in snapshot.notes():
            options.echo(line)
        if existed:
            report_changes([plan], options.echo)
        else:
            report_large_patch(folder, options.echo)
        taken |= dict.fromkeys(hosts, plan)
        return self._start(plan, snapshot, hosts)

    def _start(self, plan: RunPlan, snapshot: CodeSnapshot, hosts: Sequence[str]) -> Submission:
        """Record the intent, and start the agent of each host."""
        folder, token, options = plan.folder, uuid.uuid4().hex[:12], self.options(plan.experiment.cluster)
        folder.clear_stop()
        size = plan.layout.world_size
        intent = folder.add_attempt(world_size=size, hosts=hosts, launched_by=self.kind, token=token, job_id=token)
        state, number = folder.read_state(), intent.attempt
        folder.write_state(RunState("pending", 0 if state is None else state.step, time.time(), number, None))
        folder.make_attempt_logs(number)
        for index, host in enumerate(hosts):
            try:
                self.start(options, host, _command(plan, snapshot, number, index))
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or b""
                text = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip() or str(error)
                reason = f"{host} cannot be started: {text}"
                # The agents of other hosts end as they see it.
                close_attempt(folder, number, "failed", exit_code=FAILED, reason=reason, overrule=True)
                return Submission(plan, "failed", token, reason, FAILED)
        return Submission(plan, "submitted", token)

    def _hosts(self, plan: RunPlan) -> list[str]:
        """Hosts of a run. Raises UserError if there are too few."""
        known, nodes = list(dict.fromkeys(self.hosts(self.options(plan.experiment.cluster)))), plan.layout.nodes
        if len(known) < nodes:
            raise UserError(
                f"{plan.layout.world_size} processes, {plan.layout.node_size} on a host, need {nodes} hosts, and "
                f"cluster.options names {len(known)}. Name more, or choose fewer processes."
            )
        return known[:nodes]


def _command(plan: RunPlan, snapshot: CodeSnapshot, attempt: int, index: int) -> str:
    """Shell command that starts the agent of host `index` in the background."""
    cluster, folder = plan.experiment.cluster, plan.folder
    variables = {
        # The code as it was at submission.
        "PYTHONPATH": snapshot.package,
        IMPORT_PATH: ":".join(snapshot.import_path()),
        **dict.fromkeys(("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE"), "1"),
        **cluster.environment,
    }
    python = [cluster.python or sys.executable, "-m", AGENT, str(folder.path), str(attempt), str(index)]
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *python]
    log = folder.attempt_logs(attempt) / f"host-{index:05d}.log"
    return f"setsid nohup {shlex.join(words)} >> {shlex.quote(str(log))} 2>&1 < /dev/null &"
