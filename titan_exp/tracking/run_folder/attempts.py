"""attempts.jsonl: one row per start of a run; a run may have several worlds."""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import of_kind, parse_json, read_file, read_lines
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.files import FileLock, write_atomically

StateName = Literal["pending", "running", "done", "failed", "preempted"]

DONE, STOPPED, FAILED, HUNG = 0, 85, 1, 86
"""Exit codes of a rank: done with training; stopped on request, after saving; failed; killed by the watchdog."""
ENDED_STATES: dict[int | None, StateName] = {DONE: "done", STOPPED: "preempted"}
"""States by exit code; any other is `failed`."""


@dataclass(frozen=True)
class RunState:
    """Content of `state.json`. `running` is valid only while a process holds the run lock."""

    state: StateName
    """`pending` before the first start; `preempted` after a stop, resumable (see `shown_state`); `failed` with a
    reason."""
    step: int
    """Finished optimizer steps."""
    time: float
    """Unix time of this change."""
    attempt: int
    """Number of the attempt, from 1; 0 before the first."""
    reason: str | None
    """Reason for a failure or a stop; else None."""


@dataclass(frozen=True)
class Heartbeat:
    """Content of `heartbeat`: finished optimizer steps, the Unix time, and a warning for the user, if any."""

    step: int
    time: float
    warning: str | None = None

    @property
    def age(self) -> float:
        """Seconds since the heartbeat."""
        return max(0.0, time.time() - self.time)


def read_json(path: Path, kind: Any = dict, made: Callable[[Any], Any] | None = None) -> Any:
    """Read a JSON object from a file, as a type that `of_kind` accepts or as the result of `made`; None if the file is
    missing. Raises UserError if it is not such an object, or if `made` raises ValueError."""
    try:
        value = parse_json(read_file(path), kind)
        return value if made is None else made(value)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged, or was edited by hand ({error}). Remove it, and what it holds counts as not recorded."
        ) from None


def has_diverged(state: str, reason: str | None) -> bool:
    """True if a run failed because its loss was not finite, so that it would fail again; the reason names the trainer's
    error."""
    return state == "failed" and ": Diverged:" in (reason or "")


PREEMPTED = "SLURM preempted the job"
"""Words in the reason of a run that SLURM preempted before its time limit."""


def shown_state(state: str, reason: str | None) -> str:
    """Word for a state. Files say `preempted` of every run that saved and stopped; people say it only of a run that
    SLURM preempted. A run that is `pending` in its files is new."""
    if state == "preempted" and PREEMPTED not in (reason or ""):
        return "stopped"
    return "new" if state == "pending" else state


WORLD = "TITAN_EXP_WORLD"
"""Environment variable: world of a rank, as JSON; unset if the attempt has one world."""
LOCK_TIMEOUT = 30.0
"""Lock timeout in seconds; a rewrite of the file takes milliseconds."""

_FIELD = re.compile(r'"(\w+)": ("[^"\\]*"|\[("[^"\\]*"(, )?)*\]|[\w.+-]+)')


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
    """Unix time at which the last rank ended."""
    exit: int | None = None
    """Exit code: 0 done, 85 stopped after saving, any other failed."""
    reason: str | None = None
    launched_by: str = "local"
    """Launcher: `local`, `slurm`, or `hand` if torchrun or a user started the ranks."""
    token: str | None = None
    """Submission token in the scheduler's job, which identifies the job even if its id was not recorded."""
    restarts: int | None = None
    """Number of earlier restarts of the same job by the scheduler."""
    data: dict[str, Any] | None = None
    """Identity of the training data as the ranks opened it, by config key."""
    requeues: int = 0
    """Number of consecutive automatic requeues without a new checkpoint before this start; 0 if a user submitted it."""
    checkpoint: int | None = None
    """Step of the newest checkpoint at the start; 0 without one."""


@dataclass(frozen=True)
class World:
    """One start of one of several worlds of an attempt."""

    number: int
    """Number of the world, from 0 to `ClusterConfig.worlds` - 1."""
    start: int
    """Number of starts of worlds in this attempt before this one."""

    @property
    def logs(self) -> str:
        """Name of the log folder, below the attempt's."""
        return f"group-{self.number:02d}-start-{self.start:03d}"

    def to_environment(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {WORLD: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self | None:
        """World of this process; None if the attempt has one world. A subclass need not read its own fields."""
        values = json.loads(os.environ.get(WORLD, "null"))
        return None if values is None else cls(**{field.name: values[field.name] for field in fields(cls)})


_HINTS = get_type_hints(Attempt)


class AttemptLog:
    """Attempt rows of one run. The file is rewritten atomically under a lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Attempt]:
        """Read all rows, oldest first, one per number. A damaged line keeps the fields that can still be read, and says
        that it is damaged. Raises UserError if the file cannot be read."""
        rows: dict[int, Attempt] = {}
        try:
            for line_number, line in enumerate(read_lines(self.path), 1):
                number = max(rows, default=0) + 1
                row = self._parse(line) or self._salvage(line, line_number, number)
                rows[row.attempt] = row
        except FileNotFoundError:
            return []
        return [rows[number] for number in sorted(rows)]

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
        write_atomically(self.path, concealed("".join(json.dumps(asdict(row)) + "\n" for row in rows)))

    def _parse(self, line: bytes) -> Attempt | None:
        try:
            row = parse_json(line, Attempt)
        except ValueError:
            return None
        return row if row.attempt >= 1 else None

    def _salvage(self, line: bytes, line_number: int, number: int) -> Attempt:
        """Recover the row of a damaged line: the fields between its damages, such as the id of a job that may still
        run."""
        found: dict[str, Any] = {}
        for name, text, *_ in _FIELD.findall(line.decode(errors="replace")):
            with suppress(ValueError, KeyError):
                found[name] = of_kind(_HINTS[name], json.loads(text))
        note = f"line {line_number} of {self.path.name} is damaged"
        known = {"intent": 0.0, "end": found.get("start", found.get("intent", 0.0))}
        return Attempt(**{**known, **found, "attempt": number, "reason": found.get("reason") or note})
