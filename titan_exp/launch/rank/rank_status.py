"""Rank status: a small file per rank and attempt, written when the rank starts and when it ends.

A rank whose record has no end, and which is gone, did not end by itself.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically
from titan_exp.tracking.run_folder.state import DONE, STOPPED

FALLBACK_FOLDER = "TITAN_EXP_SPARE"
"""Environment variable: a folder on another disk for the record where the run folder's is full."""


@dataclass(frozen=True)
class RankError:
    """Why a rank ended early."""

    type: str
    """Name of the exception's class."""
    message: str
    """Its text."""
    traceback: str
    """Traceback as text."""
    user: bool
    """True for a UserError, whose message needs no traceback."""


@dataclass(frozen=True)
class RankRecord:
    """One rank."""

    rank: int
    """Number in the job."""
    pid: int
    """Process number on its machine."""
    host: str
    """Name of its machine."""
    start: float
    """Unix time."""
    end: float | None = None
    """Unix time; None while it runs."""
    exit: int | None = None
    """Exit code; None while it runs."""
    error: RankError | None = None
    """Exception that ended it."""

    @property
    def failed(self) -> bool:
        """True if it ended neither done nor saved."""
        return self.exit not in (None, DONE, STOPPED)


def write_record(folder: RunFolder, attempt: int, record: RankRecord) -> None:
    """Write a rank's record into the folder of the attempt's logs; where its disk is full, into the spare folder."""
    logs, name = folder.attempt_logs(attempt), _name(record.rank)
    text = json.dumps(asdict(record), indent=2) + "\n"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        write_atomically(logs / name, text, durable=False)
    except OSError:
        spare = os.environ.get(FALLBACK_FOLDER)
        if spare is None:
            raise
        write_atomically(Path(spare) / name, text, durable=False)


def read_record(folder: RunFolder, attempt: int, rank: int, spare: Path | None = None) -> RankRecord | None:
    """A rank's record, the one in the spare folder first; None before it started."""
    for task in (spare, folder.attempt_logs(attempt)):
        if task is None:
            continue
        try:
            fields = json.loads((task / _name(rank)).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        error = fields.pop("error")
        return RankRecord(**fields, error=None if error is None else RankError(**error))
    return None


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
