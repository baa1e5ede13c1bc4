"""Host agent: starts the ranks of one host of a run and ends them together, if no scheduler does. Also the start of an
attempt: rank 0 takes the run lock, then records the start and its address; the other ranks wait for both.

`python -m titan_exp.launch.rank.host_agent RUN_FOLDER ATTEMPT HOST` runs the agent of host number HOST of an attempt.
Agents find each other through files in the attempt's logs: each writes its machine's name there while it lives.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from titan_exp.config.devices import process_threads
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch import attempt_end
from titan_exp.launch.attempt_end import AttemptResult, close_attempt
from titan_exp.launch.executor import BY_HAND, Executor
from titan_exp.launch.rank import rank_env
from titan_exp.launch.watchdog import REPORT_TIMEOUT, HangFiles
from titan_exp.tracking.run_folder.files import wait_until, write_atomically
from titan_exp.tracking.run_folder.run_folder import DONE, FAILED, STOPPED, Attempt, RunFolder

ATTEMPT_TIMEOUT = 60.0  # seconds that other ranks wait for rank 0 to record the start


def join_attempt(folder: RunFolder, rank: rank_env.RankInfo, executor: Executor | None) -> rank_env.RankInfo:
    """Join the run's attempt and its rendezvous, whose address torchrun has set if there is no executor; returns the
    rank with its attempt number. Raises UserError if another process holds the run."""
    claim = None
    if rank.rank == 0:
        claim = attempt_end.acquire_run(folder, "rank 0", print)
        row = _open_attempt(folder, rank, executor)
    else:
        row = _await_attempt(folder, rank)
    rank = replace(rank, attempt=row.attempt, job_id=row.job_id or "", claim=claim)
    if executor is not None and rank.world_size > 1:
        executor.join_rendezvous(folder, rank)
    return rank


def _open_attempt(folder: RunFolder, rank: rank_env.RankInfo, executor: Executor | None) -> Attempt:
    """Record the start in the row written at submission; if the scheduler restarted the job, in a new row."""
    rows = folder.read_attempts()
    last = rows[-1] if rows else None
    own = last if last is not None and rank.token is not None and last.token == rank.token else None  # of this job
    if rank.token is not None and own is None:
        anew = "" if last is None else f" (attempt {last.attempt})"
        what = f"somebody started this run anew after job {rank.job_id or rank.token} was submitted{anew}"
        raise UserError(f"{folder.path}: {what}, so this job ends.")
    if own is not None and rank.restarts is None:
        rank = replace(rank, job_id=own.job_id or rank.job_id)  # the submission knows the id
    if own is not None and own.start is None and own.end is None:
        number = own.attempt
    else:
        if own is not None and own.end is None:
            reason = "the scheduler ended it without a record (a node failed, or somebody requeued it)"
            folder.update_attempt(own.attempt, end=time.time(), reason=reason)
        attempt_end.close_dead_attempts(folder)
        number = folder.add_attempt(
            world_size=rank.world_size,
            hosts=rank.hosts,
            job_id=rank.job_id or None,
            launched_by=BY_HAND if rank.token is None or executor is None else executor.kind,
            token=rank.token,
            requeues=0 if own is None else attempt_end.requeues_after(folder, own),
        ).attempt
    if rank.token is None:
        folder.clear_stop()  # a batch script has already cleared the request, and a stop may have been requested since
    if executor is not None:
        executor.publish_rendezvous(folder, replace(rank, attempt=number))
    newest = attempt_end.newest_checkpoint(folder)
    known: dict[str, Any] = {"hosts": rank.hosts, "restarts": rank.restarts, "checkpoint": newest}
    if rank.job_id:  # otherwise the submission is about to record it
        known["job_id"] = rank.job_id
    return folder.update_attempt(number, **known, start=time.time())


def _await_attempt(folder: RunFolder, rank: rank_env.RankInfo) -> Attempt:
    """Row of the attempt once rank 0 has opened it in this start of the job."""
    deadline = time.monotonic() + ATTEMPT_TIMEOUT
    while time.monotonic() < deadline:
        for row in folder.read_attempts()[-1:]:
            if rank.restarts is not None:
                joined = (row.job_id, row.restarts) == (rank.job_id, rank.restarts)
            else:  # an ended attempt may be an earlier one with the same address
                same = row.job_id == rank.job_id if rank.token is None else row.token == rank.token
                joined = same and row.end is None
            if joined and row.start is not None:
                return row
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {ATTEMPT_TIMEOUT:.0f} s. Read its log.")


FIRST_PORT, LAST_PORT = 20000, 32000  # port range of the rendezvous, below the ephemeral ports
RENDEZVOUS_TIMEOUT = 60.0  # seconds to wait for rank 0's address, because network disks may show new files late
LOOPBACK = "127.0.0.1"


def publish_address(folder: RunFolder, rank: rank_env.RankInfo, address: str, job: int) -> None:
    """Write rank 0's address and a free port, searched from one that depends on the job, into the attempt's logs."""
    assert rank.attempt is not None
    logs = folder.make_attempt_logs(rank.attempt)
    write_atomically(logs / "meeting", f"{address} {free_port(job)}\n", durable=False)


def join_rendezvous(folder: RunFolder, rank: rank_env.RankInfo) -> None:
    """Set MASTER_ADDR and MASTER_PORT to rank 0's address. Raises UserError if rank 0 has published none."""
    assert rank.attempt is not None
    path = folder.attempt_logs(rank.attempt) / "meeting"
    if not wait_until(path.exists, RENDEZVOUS_TIMEOUT):
        raise UserError(f"{path} did not appear within {RENDEZVOUS_TIMEOUT:.0f} s. Do all nodes share this folder?")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = path.read_text(encoding="utf-8").split()
    if os.environ["MASTER_ADDR"] == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def free_port(job: int) -> int:
    """Find a free port, starting at an offset that depends on the job's number."""
    count = LAST_PORT - FIRST_PORT
    for offset in range(count):
        port = FIRST_PORT + (job * 7 + offset) % count
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
        return port
    raise UserError(f"{socket.gethostname()} has no free port between {FIRST_PORT} and {LAST_PORT}.")


AGENT = "titan_exp.launch.rank.host_agent"
POLL_INTERVAL = 0.5  # seconds between checks of the ranks and the attempt
GRACE = 5.0  # seconds after the end of an attempt that its other ranks have to record their end
SILENCE = 60.0  # seconds without a sign of life of an agent after which its host counts as lost
START_LIMIT = 300.0  # seconds that the agents of all hosts have to appear
ENDED = "ended"


@dataclass(frozen=True)
class HostFile:
    """Sign of life of one agent."""

    folder: RunFolder
    attempt: int
    host: int

    @property
    def path(self) -> Path:
        """File in the attempt's logs."""
        return self.folder.attempt_logs(self.attempt) / f"host-{self.host:05d}"

    @property
    def text(self) -> str:
        """Name of the machine, or `ended`; empty before the first sign of life."""
        with contextlib.suppress(OSError):
            return self.path.read_text(encoding="utf-8")
        return ""

    @property
    def age(self) -> float | None:
        """Seconds since the last sign of life; None before the first, 0 once the agent has ended its ranks."""
        with contextlib.suppress(FileNotFoundError):
            return 0.0 if self.text == ENDED else time.time() - self.path.stat().st_mtime
        return None

    @property
    def alive(self) -> bool:
        """True if the agent runs."""
        age = self.age
        return age is not None and age < SILENCE and self.text != ENDED

    def awaited(self, since: float) -> bool:
        """True if an agent that was started at a Unix time may still appear."""
        return self.age is None and time.time() - since < START_LIMIT


class HostAgent:
    """Agent of one host. `row` is the attempt as it was recorded before its submission."""

    def __init__(self, folder: RunFolder, row: Attempt, host: int) -> None:
        self.folder, self.row, self.host = folder, row, host
        experiment = load_experiment(folder.config, trust=True)
        self.cluster, nodes = experiment.cluster, ResolvedLayout.of(experiment).nodes
        self.signs = [HostFile(folder, row.attempt, number) for number in range(nodes)]
        size = row.world_size // nodes
        self.ranks = range(host * size, (host + 1) * size)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._began = time.monotonic()
        self._stop_seen: float | None = None

    def run(self) -> int:
        """Start the ranks once the agents of all hosts have appeared; returns an exit code once they have ended."""
        signal.signal(signal.SIGTERM, lambda *_: self.folder.request_stop(f"{self._name(self.host)} received SIGTERM"))
        try:
            while not self._processes or any(process.poll() is None for process in self._processes.values()):
                self._give_sign(socket.gethostname())
                names = [sign.text for sign in self.signs]
                if not self._processes and all(names):
                    for rank in self.ranks:
                        self._processes[rank] = self._start(rank, self.row.hosts or names)
                result, rows = self._failure(), self.folder.read_attempts()[-1:]
                over = any(row.attempt != self.row.attempt or row.exit not in (None, DONE, STOPPED) for row in rows)
                if result is None and not over:
                    result = self._overdue()
                if result is not None:
                    # This overrides ends that other ranks have recorded as a consequence.
                    close_attempt(self.folder, self.row.attempt, result)
                if result is not None or over:
                    self._end_ranks()
                    return FAILED if result is None else result.exit_code
                time.sleep(POLL_INTERVAL)
            if (result := self._failure()) is not None:
                close_attempt(self.folder, self.row.attempt, result)
                return result.exit_code
            return min((process.returncode for process in self._processes.values() if process.returncode), default=DONE)
        finally:
            self._kill()
            self._give_sign(ENDED)

    def log(self, rank: int) -> Path:
        """Path of a rank's log."""
        return self.folder.attempt_logs(self.row.attempt) / f"rank-{rank:05d}.log"

    def _start(self, rank: int, hosts: Sequence[str]) -> "subprocess.Popen[bytes]":
        numbers = {"RANK": rank, "WORLD_SIZE": self.row.world_size, "LOCAL_RANK": rank - self.ranks.start}
        environment = {name: value for name, value in os.environ.items() if name not in rank_env.outer_launch()}
        environment |= {name: str(number) for name, number in numbers.items()}
        environment |= {rank_env.TOKEN: self.row.token or "", rank_env.HOSTS: ",".join(hosts)}
        environment[rank_env.IMPORT_PATH] = os.environ.get(rank_env.IMPORT_PATH, "")
        environment.setdefault("OMP_NUM_THREADS", str(process_threads(self.cluster, len(self.ranks))))
        command = [sys.executable, "-m", "titan_exp.launch.rank.main", str(self.folder.path)]
        with self.log(rank).open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=_stop_with_agent)  # noqa: PLW1509  # it has no threads

    def _failure(self) -> AttemptResult | None:
        """Result of the attempt if a rank of this host ended without a record, with the failures of all hosts."""
        own = []
        for rank, process in self._processes.items():
            record = self._record(rank)
            if process.poll() and (record is None or record.end is None):
                failure = attempt_end.failure_at_start if record is None else attempt_end.failure_from_signal
                own.append(failure(rank, time.time(), self.log(rank)))
        if not own:
            return None
        records = [self._record(rank) for rank in range(self.row.world_size)]
        recorded = [attempt_end.failure_from_error(record) for record in records if record and record.failed]
        return attempt_end.failed([*own, *recorded])

    def _overdue(self) -> AttemptResult | None:
        """Result of the attempt if ranks do not save in time, or another host is lost."""
        now = time.monotonic()
        if self._stop_seen is None and self.folder.stop_requested():
            self._stop_seen = now
        if self._stop_seen is not None and not self._processes:
            return AttemptResult("preempted", STOPPED, self.folder.stop_reason())
        if self._stop_seen is not None and now - self._stop_seen > self.cluster.stop_limit:
            reason = f"{self.folder.stop_reason()}, and killed before all ranks had saved"
            return AttemptResult("preempted", STOPPED, reason)
        for host, sign in enumerate(self.signs):
            age, log, reason = sign.age, sign.path.with_name(f"host-{host}.log"), ""
            if age is None and now - self._began > START_LIMIT:
                reason = f"did not start within {START_LIMIT:.0f} s: {log}"
            elif sign.text == ENDED and self._is_unexplained(host):
                reason = f"ended without saying why: {log}"
            elif age is not None and age > SILENCE:
                reason = f"has given no sign of life for {SILENCE:.0f} s"
            if reason:
                return AttemptResult("failed", FAILED, f"{self._name(host)} {reason}")
        return None

    def _is_unexplained(self, host: int) -> bool:
        """True if a rank of a host has recorded no end, and neither has the attempt."""
        records = [self._record(rank) for rank in range(host * len(self.ranks), (host + 1) * len(self.ranks))]
        return self.folder.read_attempts()[-1].end is None and not all(record and record.end for record in records)

    def _end_ranks(self) -> None:
        pending = HangFiles(self.folder.attempt_logs(self.row.attempt), self.row.world_size).report_pending()
        deadline = time.monotonic() + (2 * REPORT_TIMEOUT if pending else GRACE)
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            self._give_sign(socket.gethostname())
            time.sleep(0.1)

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                with contextlib.suppress(psutil.Error):
                    parent = psutil.Process(process.pid)
                    for victim in [*parent.children(recursive=True), parent]:
                        victim.kill()
                process.wait()

    def _give_sign(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a network disk may fail for a while, and ranks leave a lost folder alone
            self.signs[self.host].path.write_text(text, encoding="utf-8")

    def _record(self, rank: int) -> rank_env.RankRecord | None:
        return rank_env.read_record(self.folder, self.row.attempt, rank)

    def _name(self, host: int) -> str:
        return f"host {self.row.hosts[host]}" if self.row.hosts else f"node {host}"


def _stop_with_agent() -> None:
    """Make the kernel send SIGTERM to this rank when its agent ends, so that it saves and stops."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def main(arguments: Sequence[str]) -> int:
    """Run the agent of a host; returns the exit code of its ranks, or 0 if the attempt is already over."""
    path, attempt, host = arguments
    folder = RunFolder(path)
    rank_env.extend_import_path()
    rows = folder.read_attempts()
    if not rows or rows[-1].attempt != int(attempt) or rows[-1].end is not None:
        print(f"{path}: attempt {attempt} is over, so this host starts nothing.")
        return DONE
    agent = HostAgent(folder, rows[-1], int(host))
    if agent.signs[agent.host].age is not None:
        again = "To start the next one, type the command that launched it."
        print(f"{path}: attempt {attempt} has already run here. {again}")
        return FAILED
    return agent.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
