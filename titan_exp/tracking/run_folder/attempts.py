"""attempts.jsonl: one row for every start of a run, whatever became of it."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.file_lock import FileLock

LOCK_TIMEOUT = 30.0
"""Seconds to wait for another process that rewrites the file, which takes it milliseconds."""


@dataclass(frozen=True)
class Attempt:
    """One start. Fields that are not known yet, or never became known, are None."""

    attempt: int
    """Number of the start, from 1."""
    intent: float
    """Unix time at which it was decided; the row is written before anything is submitted."""
    job_id: str | None
    """The scheduler's number of it."""
    hosts: tuple[str, ...]
    """Machines that it runs on."""
    world_size: int
    """Processes."""
    start: float | None
    """Unix time at which its processes were started."""
    end: float | None
    """Unix time at which the last of them was gone."""
    exit: int | None
    """0 done, 85 stopped after saving, anything else failed."""
    reason: str | None
    """How it ended, in words."""
    launched_by: str = "local"
    """Who holds it: `local`, `slurm`, or `hand` where torchrun or a user started the ranks."""
    token: str | None = None
    """What a scheduler's job carries so that it is found where its number was never written down."""
    restarts: int | None = None
    """How often the scheduler had started the same job before."""
    requeues: int = 0
    """How often in a row, before this start, the run went on by itself; 0 where somebody submitted it."""


class AttemptLog:
    """The rows of one run. Rewritten whole, under a lock, so that rows neither double nor tear."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Attempt]:
        """All rows, oldest first.

        Raises:
            UserError: a line is not a row.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [self._parse(number, line) for number, line in enumerate(lines, 1)]

    def add(
        self, *, world_size: int, hosts: Sequence[str], job_id: str | None, launched_by: str = "local", **fields: Any
    ) -> Attempt:
        """Write down the intent to start once more, with any further fields of the row; returns the new row."""
        with self._locked():
            rows = self.read()
            number = rows[-1].attempt + 1 if rows else 1
            row = Attempt(
                attempt=number,
                intent=time.time(),
                job_id=job_id,
                hosts=tuple(hosts),
                world_size=world_size,
                start=None,
                end=None,
                exit=None,
                reason=None,
                launched_by=launched_by,
                **fields,
            )
            self._write([*rows, row])
        return row

    def update(self, number: int, **fields: Any) -> Attempt:
        """Fill in fields of row `number`; returns the row as it is now."""
        with self._locked():
            rows = self.read()
            index = next(index for index, row in enumerate(rows) if row.attempt == number)
            rows[index] = replace(rows[index], **fields)
            self._write(rows)
        return rows[index]

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
            raise UserError(f"{self.path}, line {number}: not a start of this run. Remove that line.") from None
