"""Attempt result from the ranks' exit codes; the first failure is the cause."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.health.hang_report import HangDiagnosis
from titan_exp.launch.rank.rank_status import RankRecord
from titan_exp.tracking.run_folder.state import DONE, FAILED, HUNG, STOPPED, StateName

TAIL = 20
"""Log lines shown for a rank without a traceback."""


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


def failure_from_error(record: RankRecord) -> RankFailure:
    """Failure of a rank that recorded its end."""
    assert record.end is not None
    assert record.exit is not None
    if record.error is None:
        return RankFailure(record.rank, record.end, record.exit, f"rank {record.rank}: exit code {record.exit}", "")
    error = record.error
    detail = error.message if error.user else error.traceback
    return RankFailure(record.rank, record.end, record.exit, error.reason(record.rank), detail)


def failure_from_signal(rank: int, last_seen: float, log: Path) -> RankFailure:
    """Failure of a rank that was killed after its start."""
    reason = f"rank {rank} was killed by a signal, probably out of memory: see `dmesg`, lower training.micro_batch_size"
    return RankFailure(rank, last_seen, FAILED, reason, tail(log))


def failure_at_start(rank: int, time: float, log: Path) -> RankFailure:
    """Failure of a rank whose process exited before writing its status record."""
    return RankFailure(rank, time, FAILED, f"rank {rank} did not start", tail(log))


def failed(failures: Iterable[RankFailure]) -> AttemptResult:
    """Attempt result with failed ranks; the first failure is the cause."""
    first = min(failures, key=lambda failure: (failure.time, failure.rank))
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
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([f"End of {log}:", *lines[-TAIL:]]) if lines else ""
