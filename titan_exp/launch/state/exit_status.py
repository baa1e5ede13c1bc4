"""Result of an attempt from its ranks' exit codes; the first failure is the cause."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.health.hang_report import HangDiagnosis
from titan_exp.launch.rank.rank_status import RankRecord
from titan_exp.tracking.run_folder.state import DONE, FAILED, HUNG, STOPPED, StateName

TAIL = 20
"""Lines of a rank's log shown where it left no traceback."""


@dataclass(frozen=True)
class AttemptResult:
    """The end of an attempt."""

    state: StateName
    """State of the run."""
    exit_code: int
    """0 done, 85 stopped after saving, 86 failed because it hung, 2 failed by what the user can put right,
    1 failed otherwise."""
    reason: str | None
    """One line; None for a run that is done."""
    detail: str = ""
    """Traceback of the first rank that failed, or the end of its log."""


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended otherwise than it should."""

    rank: int
    """Number in the job."""
    time: float
    """Unix time; for a rank that vanished, when it was last seen alive."""
    exit_code: int
    """Its exit code, or 1 where none is known."""
    reason: str
    """One line."""
    detail: str
    """Traceback or end of the log."""


def failure_from_error(record: RankRecord) -> RankFailure:
    """The death of a rank that wrote down how it ended."""
    assert record.end is not None
    assert record.exit is not None
    if record.error is None:
        return RankFailure(record.rank, record.end, record.exit, f"rank {record.rank}: exit code {record.exit}", "")
    error = record.error
    first_line = error.message.strip().partition("\n")[0]
    reason = f"rank {record.rank}: {error.type}: {first_line}".removesuffix(": ")
    if record.exit == HUNG:
        reason = first_line  # of the run, not of this rank
    return RankFailure(record.rank, record.end, record.exit, reason, error.message if error.user else error.traceback)


def failure_from_signal(rank: int, last_seen: float, log: Path) -> RankFailure:
    """The death of a rank that began, and vanished without a word."""
    reason = (
        f"rank {rank} vanished without a word: a signal killed it. "
        "The likely cause is that memory ran out; `dmesg` tells, and a smaller training.micro_batch_size needs less"
    )
    return RankFailure(rank, last_seen, FAILED, reason, tail(log))


def failure_at_start(rank: int, time: float, log: Path) -> RankFailure:
    """The death of a rank whose process ended before it came to run any of our code."""
    return RankFailure(rank, time, FAILED, f"rank {rank} did not start", tail(log))


def failed(deaths: Iterable[RankFailure]) -> AttemptResult:
    """The verdict where ranks died: the first to die is the cause, the others fail of its absence."""
    first = min(deaths, key=lambda death: (death.time, death.rank))
    code = UserError.exit_code if first.exit_code == UserError.exit_code else FAILED
    return AttemptResult("failed", code, first.reason, first.detail)


def hung(hang: HangDiagnosis) -> AttemptResult:
    """The verdict where ranks ended because none of them got any further."""
    return AttemptResult("failed", HUNG, hang.headline, hang.text)


def ended(exit_codes: Iterable[int], stop_reason: str | None) -> AttemptResult:
    """The verdict where every rank ended as it should."""
    if STOPPED in exit_codes:
        return AttemptResult("preempted", STOPPED, stop_reason or "stopped after saving")
    return AttemptResult("done", DONE, None)


def tail(log: Path) -> str:
    """The last lines of a log, with its name; empty where there are none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([f"The end of {log}:", *lines[-TAIL:]]) if lines else ""
