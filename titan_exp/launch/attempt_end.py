"""End of an attempt: its result, from the ranks' exit codes, and its record; and the run lock, which one start holds.

The first failure is the cause. A broken collective is the cause only if every failed rank reports one.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.rank.rank_env import RankRecord
from titan_exp.launch.watchdog import HangDiagnosis
from titan_exp.tracking.run_folder.files import FileLock, LockHolder, last_lines, wait_until
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run import DIED_UNRECORDED
from titan_exp.tracking.run_folder.run_folder import (
    DONE,
    FAILED,
    HUNG,
    STOPPED,
    Attempt,
    LockedError,
    RunFolder,
    RunState,
    StateName,
)

TAIL = 20  # log lines shown for a rank without a traceback
LESS_MEMORY = "let it need less, with fewer processes per node, a lower data.prefetch"
LESS_MEMORY += " or, on a CPU, a lower training.micro_batch_size"
"""Remedy for host memory."""
_BROKEN_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_BROKEN_MESSAGES = re.compile(r"gloo/|\bnccl|connection (closed|reset) by peer|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt."""

    state: StateName
    exit_code: int  # 0 done, 85 stopped after saving, 86 hung, 2 failed by a UserError, 1 failed otherwise
    reason: str | None  # one line; None if done
    detail: str = ""  # traceback of the first rank that failed, or the end of its log


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    time: float  # unix time; for a killed rank, when it was last seen alive
    exit_code: int  # 1 if unknown
    reason: str
    detail: str
    broken_collective: bool = False  # True if a collective broke: another rank failed first


def failure_from_error(record: RankRecord) -> RankFailure:
    """Failure of a rank that recorded its end."""
    assert record.end is not None
    assert record.exit is not None
    if (error := record.error) is None:
        return RankFailure(record.rank, record.end, record.exit, f"rank {record.rank}: exit code {record.exit}", "")
    # What gloo, NCCL and torch.distributed raise when a peer is gone.
    by_message = error.type == "RuntimeError" and _BROKEN_MESSAGES.search(error.message) is not None
    broken, detail = by_message or error.type in _BROKEN_TYPES, error.message if error.user else error.traceback
    return RankFailure(record.rank, record.end, record.exit, error.reason(record.rank), detail, broken)


def failure_from_signal(
    rank: int, last_seen: float, log: Path, *, out_of_memory: bool = False, more_memory: str = ""
) -> RankFailure:
    """Failure of a rank that was killed; `more_memory` is the remedy if more host memory can be requested."""
    remedy = f"{more_memory}{LESS_MEMORY}"
    if out_of_memory:
        reason = f"the machine or the job ran out of host memory, so the system killed rank {rank}: {remedy}"
    else:
        reason = f"a signal killed rank {rank}. If nobody sent it, host memory ran out (see dmesg): {remedy}"
    return RankFailure(rank, last_seen, FAILED, reason, tail(log))


def failure_at_start(rank: int, time: float, log: Path) -> RankFailure:
    """Failure of a rank whose process exited before writing its status record."""
    return RankFailure(rank, time, FAILED, f"rank {rank} did not start", tail(log))


def failed(failures: Iterable[RankFailure]) -> AttemptResult:
    """Result of an attempt with failed ranks. The first failure that is not a broken collective is the cause."""
    first = min(failures, key=lambda failure: (failure.broken_collective, failure.time, failure.rank))
    code = UserError.exit_code if first.exit_code == UserError.exit_code else FAILED
    return AttemptResult("failed", code, first.reason, first.detail)


def hung(hang: HangDiagnosis) -> AttemptResult:
    """Attempt result of a hang."""
    return AttemptResult("failed", HUNG, hang.headline, hang.text)


def ended(exit_codes: Iterable[int], stop_reason: str | None) -> AttemptResult:
    """Attempt result without failed ranks."""
    if STOPPED in exit_codes:
        return AttemptResult("preempted", STOPPED, stop_reason or "stopped after saving")
    return AttemptResult("done", DONE, None)


def tail(log: Path) -> str:
    """Last lines of a log, below its path; empty if there are none."""
    lines = last_lines(log, TAIL)
    return "\n".join([f"End of {log}:", *lines]) if lines else ""


def close_attempt(folder: RunFolder, attempt: int, result: AttemptResult, *, overrule: bool = True) -> None:
    """Record the end of an attempt. Launcher and SLURM epilogue `overrule` a failure that a rank recorded, after all
    ranks have ended; among ranks the first recorded failure is kept as the cause."""
    now = folder.read_state()
    if not overrule and now is not None and now.attempt == attempt and now.state == "failed":
        return
    folder.write_state(RunState(result.state, last_step(folder, attempt), time.time(), attempt, result.reason))
    folder.update_attempt(attempt, end=time.time(), exit=result.exit_code, reason=result.reason)


def last_step(folder: RunFolder, attempt: int) -> int:
    """Last step that an attempt is known to have finished, else the step from which it resumed."""
    state, beat = folder.read_state(), folder.read_heartbeat()
    steps = [0 if state is None else state.step]
    row = next((row for row in folder.read_attempts() if row.attempt == attempt), None)
    # An older attempt's heartbeat may be ahead of the checkpoint that this one resumed from. The newest heartbeat may
    # lag by a second, but the last step is always logged.
    if beat is not None and row is not None and beat.time >= row.intent:
        steps.append(beat.step)
    with contextlib.suppress(UserError):  # damaged metrics must not prevent the record
        logged = [row for row in read_metrics(folder.metrics) if row.get("attempt") == attempt]
        steps += [int(row["step"] or 0) for row in logged[-1:]]
    return max(steps)


def newest_checkpoint(folder: RunFolder) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max(CheckpointFolder(folder.checkpoints).complete_steps(), default=0)


def requeues_after(folder: RunFolder, row: Attempt) -> int:
    """Number of requeues in a row, with the next; 0 if this attempt has written a newer checkpoint."""
    progressed = row.checkpoint is not None and newest_checkpoint(folder) > row.checkpoint
    return 0 if progressed else row.requeues + 1


def close_dead_attempts(folder: RunFolder) -> None:
    """Close attempts without a recorded end; the caller holds the run lock."""
    for row in folder.read_attempts():
        if row.end is None:
            beat = folder.read_heartbeat()
            known = beat.time if beat is not None and beat.time >= row.intent else row.start or row.intent
            unstarted = row.token is not None and row.start is None
            reason = "its job is gone and never started" if unstarted else DIED_UNRECORDED
            folder.update_attempt(row.attempt, end=known, reason=reason)


ORPHANS_LIMIT = 15.0


def acquire_run(folder: RunFolder, role: str, echo: Callable[[str], None]) -> FileLock:
    """Acquire the run lock, and wait for orphaned ranks. Raises UserError if the run is active elsewhere."""
    try:
        lock = folder.claim(role)
    except LockedError as error:
        raise _refusal(folder, error.holder) from None
    try:
        wait_for_orphans(folder, echo)
    except BaseException:
        lock.release()
        raise
    return lock


def wait_for_orphans(folder: RunFolder, echo: Callable[[str], None]) -> None:
    """Wait up to ORPHANS_LIMIT seconds for orphaned ranks of an earlier start. Raises UserError if they remain."""
    if not folder.ranks_alive():
        return
    still = f"Ranks of an earlier start still run in {folder.path}, and their launcher is gone"
    echo(f"{still}. We wait up to {ORPHANS_LIMIT:.0f} s for them to save and stop.")
    if not wait_until(lambda: not folder.ranks_alive(), ORPHANS_LIMIT):
        raise _refusal(folder, FileLock(folder.ranks_lock).holder())


def _refusal(folder: RunFolder, holder: LockHolder | None) -> UserError:
    beat, state = folder.read_heartbeat(), folder.read_state()
    heartbeat = f", last heartbeat {beat.age:.0f} s ago, after step {beat.step}" if beat else ""
    attempt = f", attempt {state.attempt}" if state and state.attempt else ""
    who = f"{holder or 'another process'}{attempt}{heartbeat}"
    remedy = "Wait for it, or stop it with Ctrl-C or SIGTERM where it runs."
    remedy += " To run the same beside it, choose another experiment.name."
    return UserError(f"{folder.path}: this run is already running ({who}). {remedy}")
