"""Attempt result from the ranks' exit codes.

The first failure is the cause. A collective that broke is the consequence of another rank's end, and the cause only if
every failed rank reports one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.health.hang_report import HangDiagnosis
from titan_exp.launch.rank.rank_status import RankError, RankRecord
from titan_exp.tracking.run_folder.attempts import DONE, FAILED, HUNG, STOPPED, StateName
from titan_exp.tracking.run_folder.files import last_lines

TAIL = 20
"""Log lines shown for a rank without a traceback."""
LESS_MEMORY = "let it need less: fewer processes per node, a lower data.prefetch or, on CPU, training.micro_batch_size"
"""Remedy for host memory."""
_BROKEN_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_BROKEN_MESSAGES = re.compile(r"gloo/|\bnccl|connection (closed|reset) by peer|broken pipe", re.IGNORECASE)


@dataclass(frozen=True)
class AttemptResult:
    """Result of an attempt."""

    state: StateName
    exit_code: int
    """0 done, 85 stopped after saving, 86 hung, 2 failed by a UserError, 1 failed otherwise."""
    reason: str | None
    """One line; None if done."""
    detail: str = ""
    """Traceback of the first rank that failed, or the end of its log."""


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank."""

    rank: int
    time: float
    """Unix time; for a killed rank, when it was last seen alive."""
    exit_code: int
    """1 if unknown."""
    reason: str
    detail: str
    """Traceback or end of the log."""
    broken_collective: bool = False
    """True if a collective broke: another rank failed first."""


def failure_from_error(record: RankRecord) -> RankFailure:
    """Failure of a rank that recorded its end."""
    assert record.end is not None
    assert record.exit is not None
    if record.error is None:
        return RankFailure(record.rank, record.end, record.exit, f"rank {record.rank}: exit code {record.exit}", "")
    error = record.error
    detail = error.message if error.user else error.traceback
    reason, broken = error.reason(record.rank), is_broken_collective(error)
    return RankFailure(record.rank, record.end, record.exit, reason, detail, broken)


def failure_from_signal(
    rank: int, last_seen: float, log: Path, *, out_of_memory: bool = False, more_memory: str = ""
) -> RankFailure:
    """Failure of a rank that was killed after its start.

    `more_memory` is the remedy where host memory can be asked for; `out_of_memory` is True if the kernel reports that.
    """
    remedy = f"{more_memory}{LESS_MEMORY}"
    if out_of_memory:
        reason = f"rank {rank} was killed because its machine or job ran out of host memory: {remedy}"
    else:
        reason = f"rank {rank} was killed by a signal; if not by hand, host memory ran out (see `dmesg`): {remedy}"
    return RankFailure(rank, last_seen, FAILED, reason, tail(log))


def is_broken_collective(error: RankError) -> bool:
    """True for the errors of gloo, NCCL and torch.distributed when a peer is gone."""
    by_message = error.type == "RuntimeError" and _BROKEN_MESSAGES.search(error.message) is not None
    return by_message or error.type in _BROKEN_TYPES


def failure_without_traceback(rank: int, time: float, log: Path) -> RankFailure:
    """Failure of a rank whose process ended in native code, for example by a segmentation fault."""
    return RankFailure(rank, time, FAILED, f"rank {rank} ended without a traceback", tail(log))


def failure_at_start(rank: int, time: float, log: Path) -> RankFailure:
    """Failure of a rank whose process exited before writing its status record."""
    return RankFailure(rank, time, FAILED, f"rank {rank} did not start", tail(log))


def failed(failures: Iterable[RankFailure]) -> AttemptResult:
    """Attempt result with failed ranks; the first failure is the cause, before all broken collectives."""
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
