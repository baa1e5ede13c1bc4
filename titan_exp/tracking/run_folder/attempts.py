"""attempts.jsonl: one row per start of a run."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.file_lock import FileLock

LOCK_TIMEOUT = 30.0
"""Lock timeout in seconds; a rewrite of the file takes milliseconds."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Fields are None while unknown."""

    attempt: int
    """Number, from 1."""
    intent: float
    """Unix time of this row, written before the submission."""
    job_id: str | None = None
    hosts: tuple[str, ...] = ()
    world_size: int = 1
    start: float | None = None
    """Unix time of the start of the ranks."""
    end: float | None = None
    """Unix time of the end of the last rank."""
    exit: int | None = None
    """Exit code: 0 done, 85 stopped after saving, any other failed."""
    reason: str | None = None
    launched_by: str = "local"
    """Launcher: `local`, `slurm`, or `hand` if torchrun or a user started the ranks."""
    token: str | None = None
    """Submission token in the scheduler's job; identifies the job even if its id was not recorded."""
    restarts: int | None = None
    """Earlier restarts of the same job by the scheduler."""
    data: dict[str, Any] | None = None
    """Identity of the training data as the ranks opened it, by config key."""
    requeues: int = 0
    """Consecutive automatic requeues without a new checkpoint before this start; 0 if a user submitted it."""
    checkpoint: int | None = None
    """Step of the newest checkpoint at the start; 0 without one."""


class AttemptLog:
    """Attempt rows of one run. The file is rewritten atomically under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Attempt]:
        """Read all rows, oldest first. Raises UserError if a line is not a row."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [self._parse(number, line) for number, line in enumerate(lines, 1)]

    def add(self, **fields: Any) -> Attempt:
        """Append a row with the intent to start; returns it."""
        with self._locked():
            rows = self.read()
            row = Attempt(attempt=rows[-1].attempt + 1 if rows else 1, intent=time.time(), **fields)
            self._write([*rows, row])
        return row

    def update(self, number: int, **fields: Any) -> Attempt:
        """Set fields of row `number`; returns the new row. A row whose file was deleted is added again."""
        with self._locked():
            rows = self.read()
            known = next((row for row in rows if row.attempt == number), Attempt(number, intent=time.time()))
            row = replace(known, **fields)
            others = [other for other in rows if other.attempt != number]
            self._write(sorted([*others, row], key=lambda each: each.attempt))
        return row

    def _locked(self) -> FileLock:
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"))
        lock.acquire(timeout=LOCK_TIMEOUT)
        return lock

    def _write(self, rows: list[Attempt]) -> None:
        write_atomically(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in rows))

    def _parse(self, number: int, line: str) -> Attempt:
        try:
            fields = json.loads(line)
            return Attempt(**{**fields, "hosts": tuple(fields["hosts"])})
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{self.path}, line {number}: not an attempt of this run. Remove that line.") from None
