"""Attempt start: rank 0 takes the run lock, then records the start and its address; the other ranks wait for both."""

import os
import socket
import time
from dataclasses import replace
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import BY_HAND, Executor
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.state.attempt_end import acquire_run, close_dead_attempts, newest_checkpoint, requeues_after
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder

ATTEMPT_TIMEOUT = 60.0
"""Seconds that other ranks wait for rank 0 to record the start."""


def join_attempt(folder: RunFolder, rank: RankInfo, executor: Executor | None) -> RankInfo:
    """Join the run's attempt and its rendezvous; returns the rank with its attempt number.

    Without an executor, torchrun has set the rendezvous address. Raises UserError if another process holds the run.
    """
    claim = None
    if rank.rank == 0:
        claim = acquire_run(folder, "rank 0", print)
        row = _open_attempt(folder, rank, executor)
    else:
        row = _await_attempt(folder, rank)
    rank = replace(rank, attempt=row.attempt, job_id=row.job_id or "", claim=claim)
    if executor is not None and rank.world_size > 1:
        executor.join_rendezvous(folder, rank)
    return rank


def _open_attempt(folder: RunFolder, rank: RankInfo, executor: Executor | None) -> Attempt:
    """Record the start in the row written at submission; if the scheduler restarted the job, in a new row."""
    rows = folder.read_attempts()
    last = rows[-1] if rows else None
    same_job = last is not None and rank.token is not None and last.token == rank.token
    if rank.token is not None and not same_job:
        raise UserError(
            f"{folder.path}: somebody started this run anew after job {rank.job_id or rank.token} was submitted"
            f"{'' if last is None else f' (attempt {last.attempt})'}, so this job ends."
        )
    if last is not None and same_job and rank.restarts is None:
        rank = replace(rank, job_id=last.job_id or rank.job_id)  # the submission knows the id
    if last is not None and same_job and last.start is None and last.end is None:
        number = last.attempt
    else:
        if last is not None and same_job and last.end is None:
            reason = "the scheduler ended it without a record (a node failed, or somebody requeued it)"
            folder.update_attempt(last.attempt, end=time.time(), reason=reason)
        close_dead_attempts(folder)
        number = folder.add_attempt(
            world_size=rank.world_size,
            hosts=rank.hosts,
            job_id=rank.job_id or None,
            launched_by=BY_HAND if rank.token is None or executor is None else executor.kind,
            token=rank.token,
            requeues=requeues_after(folder, last) if last is not None and same_job else 0,
        ).attempt
    if rank.token is None:
        folder.clear_stop()  # a batch script has already cleared the request, and a stop may have been requested since
    if executor is not None:
        executor.publish_rendezvous(folder, replace(rank, attempt=number))
    known: dict[str, Any] = {"hosts": rank.hosts, "restarts": rank.restarts, "checkpoint": newest_checkpoint(folder)}
    if rank.job_id:  # otherwise the submission is about to record it
        known["job_id"] = rank.job_id
    return folder.update_attempt(number, **known, start=time.time())


def _await_attempt(folder: RunFolder, rank: RankInfo) -> Attempt:
    deadline = time.monotonic() + ATTEMPT_TIMEOUT
    while time.monotonic() < deadline:
        rows = folder.read_attempts()
        if rows and rows[-1].start is not None and _is_joined(rows[-1], rank):
            return rows[-1]
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {ATTEMPT_TIMEOUT:.0f} s. Read its log.")


def _is_joined(row: Attempt, rank: RankInfo) -> bool:
    """True if rank 0 has opened this attempt in this start of the job."""
    if rank.restarts is not None:
        return (row.job_id, row.restarts) == (rank.job_id, rank.restarts)
    # Without a restart count, an ended attempt may be an earlier one with the same address.
    same = row.job_id == rank.job_id if rank.token is None else row.token == rank.token
    return same and row.end is None


FIRST_PORT, LAST_PORT = 20000, 32000
"""Port range of the rendezvous, below the ephemeral ports."""
RENDEZVOUS_TIMEOUT = 60.0
"""Seconds to wait for rank 0's address, because network disks may show new files late."""
LOOPBACK = "127.0.0.1"


def publish_address(folder: RunFolder, rank: RankInfo, address: str, job: int) -> None:
    """Write rank 0's address and a free port into the attempt's log folder. The job's number decides which ports are
    tried."""
    assert rank.attempt is not None
    logs = folder.make_attempt_logs(rank.attempt)
    write_atomically(logs / "meeting", f"{address} {free_port(job)}\n", durable=False)


def join_rendezvous(folder: RunFolder, rank: RankInfo) -> None:
    """Set MASTER_ADDR and MASTER_PORT to rank 0's address. Raises UserError if rank 0 has published none."""
    assert rank.attempt is not None
    path, deadline = folder.attempt_logs(rank.attempt) / "meeting", time.monotonic() + RENDEZVOUS_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path} did not appear within {RENDEZVOUS_TIMEOUT:.0f} s. Do all nodes share this folder?")
        time.sleep(0.1)
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
