"""Rank status: one small file per rank and attempt, written at the rank's start and end.

A rank that has exited without a recorded end was killed.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.attempts import DONE, STOPPED, read_json
from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically

FALLBACK_FOLDER = "TITAN_EXP_SPARE"
"""Environment variable: folder on another disk for the record if the run folder is missing or its disk is full."""


HANG, FOLDER_LOST = "Hung", "FolderLost"
"""Types of the errors that concern the run and not one rank."""


@dataclass(frozen=True)
class RankError:
    """Error that ended a rank."""

    type: str
    """Class name of the exception."""
    message: str
    traceback: str
    user: bool
    """True for a UserError, whose message needs no traceback."""

    def reason(self, rank: int) -> str:
        """First line of the message, with the rank and the type unless it concerns the run."""
        line = self.message.strip().partition("\n")[0]
        return line if self.type in (HANG, FOLDER_LOST) else f"rank {rank}: {self.type}: {line}".removesuffix(": ")


@dataclass(frozen=True)
class RankRecord:
    """Status record of one rank. Times are Unix times."""

    rank: int
    pid: int
    host: str
    start: float
    end: float | None = None
    """None while running."""
    exit: int | None = None
    """Exit code; None while running."""
    error: RankError | None = None
    signal: str | None = None
    """First signal that asked this rank to stop. A rank without one and without an end was not killed by srun, which
    sends SIGTERM first."""

    @property
    def failed(self) -> bool:
        """True if the rank ended with an exit code other than DONE and STOPPED."""
        return self.exit not in (None, DONE, STOPPED)


def write_record(folder: RunFolder, attempt: int, record: RankRecord) -> None:
    """Write a rank's record beside the attempt's logs, or into the fallback folder if that fails."""
    name = _name(record.rank)
    text = concealed(json.dumps(asdict(record), indent=2)) + "\n"
    try:
        write_atomically(folder.make_attempt_logs(attempt) / name, text, durable=False)
    except OSError:
        fallback = os.environ.get(FALLBACK_FOLDER)
        if fallback is None:
            raise
        write_atomically(Path(fallback) / name, text, durable=False)


def read_record(folder: RunFolder, attempt: int, rank: int, fallback: Path | None = None) -> RankRecord | None:
    """Read a rank's record, from the fallback folder first; None before its start, and if it is damaged."""
    for logs in (fallback, folder.attempt_logs(attempt)):
        if logs is None:
            continue
        with contextlib.suppress(UserError):  # damaged: as if the rank had not started
            if (record := read_json(logs / _name(rank), RankRecord)) is not None:
                return record
    return None


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
