"""Run folder: all files of a run, its attempts, and the interface between launching, training and comparing.

Rank 0 and the launcher write; any process may read at any time. Every file stays readable after a crash.
"""

import errno
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import of_kind, parse_json, read_file, read_lines, read_text
from titan_exp.config.schema.foreign_code import SIGNATURE_FILE
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.files import (
    FileLock,
    LockedError,
    LockHolder,
    is_held,
    mkdir_below,
    overwrite,
    write_atomically,
)

StateName = Literal["pending", "running", "done", "failed", "preempted"]
DONE, STOPPED, FAILED, HUNG = 0, 85, 1, 86
"""Exit codes of a rank: done with training; stopped on request, after saving; failed; killed by the watchdog."""
ENDED_STATES: dict[int | None, StateName] = {DONE: "done", STOPPED: "preempted"}
"""States by exit code; any other is `failed`."""


@dataclass(frozen=True)
class RunState:
    """Content of `state.json`. `running` is valid only while a process holds the run lock."""

    state: StateName  # `pending` before the first start; `preempted` after a stop, resumable (see `shown_state`)
    step: int  # finished optimizer steps
    time: float  # Unix time of this change
    attempt: int  # number of the attempt, from 1; 0 before the first
    reason: str | None  # reason for a failure or a stop; else None


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
        remedy = "Remove it, and what it holds counts as not recorded."
        raise UserError(f"{path} is damaged, or was edited by hand ({error}). {remedy}") from None


def has_diverged(state: str, reason: str | None) -> bool:
    """True if a run failed because its loss was not finite, so that it would fail again."""
    return state == "failed" and ": Diverged:" in (reason or "")


PREEMPTED = "SLURM preempted the job"  # words in the reason of a run that SLURM preempted before its time limit


def shown_state(state: str, reason: str | None) -> str:
    """Word for a state. Files say `preempted` of every run that saved and stopped; people say it only of a run that
    SLURM preempted. A run that is `pending` in its files is new."""
    if state == "preempted" and PREEMPTED not in (reason or ""):
        return "stopped"
    return "new" if state == "pending" else state


WORLD = "TITAN_EXP_WORLD"  # environment variable: world of a rank, as JSON; unset if the attempt has one world
LOCK_TIMEOUT = 30.0  # lock timeout in seconds; a rewrite of the file takes milliseconds
_FIELD = re.compile(r'"(\w+)": ("[^"\\]*"|\[("[^"\\]*"(, )?)*\]|[\w.+-]+)')


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Fields are None while unknown."""

    attempt: int  # number, from 1
    intent: float  # Unix time of this row, written before the submission
    job_id: str | None = None
    hosts: tuple[str, ...] = ()
    world_size: int = 1
    start: float | None = None  # Unix time of the start of the ranks
    end: float | None = None  # Unix time at which the last rank ended
    exit: int | None = None  # exit code: 0 done, 85 stopped after saving, any other failed
    reason: str | None = None
    launched_by: str = "local"  # launcher: `local`, `slurm`, or `hand` if torchrun or a user started the ranks
    token: str | None = None  # submission token in the scheduler's job, which identifies it even without a recorded id
    restarts: int | None = None  # number of earlier restarts of the same job by the scheduler
    data: dict[str, Any] | None = None  # identity of the training data as the ranks opened it, by config key
    requeues: int = 0  # automatic requeues without a new checkpoint before this start; 0 if a user submitted it
    checkpoint: int | None = None  # step of the newest checkpoint at the start; 0 without one


@dataclass(frozen=True)
class World:
    """One start of one of several worlds of an attempt."""

    number: int  # number of the world, from 0 to `ClusterConfig.worlds` - 1
    start: int  # number of starts of worlds in this attempt before this one

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


def _attempt(line: bytes, note: str, number: int) -> Attempt:
    """Attempt of a line. Of a damaged one, the row `number` with the fields between its damages, such as the id of a
    job that may still run."""
    with suppress(ValueError):
        row = parse_json(line, Attempt)
        if row.attempt >= 1:
            return row
    found: dict[str, Any] = {}
    for name, text, *_ in _FIELD.findall(line.decode(errors="replace")):
        with suppress(ValueError, KeyError):
            found[name] = of_kind(_HINTS[name], json.loads(text))
    known = {"intent": 0.0, "end": found.get("start", found.get("intent", 0.0))}
    return Attempt(**{**known, **found, "attempt": number, "reason": found.get("reason") or note})


__all__ = ["Attempt", "Heartbeat", "LockHolder", "LockedError", "RunFolder", "RunState", "write_atomically"]
HEARTBEAT_SECONDS = 1.0  # minimum seconds between heartbeats; a step may be shorter than a write to a network disk


class RunFolder:
    """Paths of a run folder, and its state, heartbeat, attempts and locks. For the ranks of one of several worlds,
    `world_logs` names their folder below the attempt's logs."""

    def __init__(self, path: str | os.PathLike[str], *, world_logs: str | None = None) -> None:
        self.path = Path(path)
        self._world_logs = world_logs
        self.config = self.path / "config.yaml"
        """Resolved configuration."""
        self.signature = self.path / SIGNATURE_FILE
        """Signatures of the configuration by the users who launched the run."""
        self.overrides = self.path / "overrides.yaml"
        """Overrides as typed."""
        self.nondefault = self.path / "nondefault.yaml"
        """Overrides that differ from the defaults of the code that started the run."""
        self.code = self.path / "code.json"
        """Commit, dirty flag, branch."""
        self.diff = self.path / "diff.patch"
        """Diff of the working tree against the commit."""
        self.env = self.path / "env.json"
        """Versions and hardware."""
        self.plan = self.path / "plan.json"
        """Prediction made before the newest start."""
        self.attempts = self.path / "attempts.jsonl"
        """One row per start."""
        self.state = self.path / "state.json"
        self.heartbeat = self.path / "heartbeat"
        """Last heartbeat of rank 0."""
        self.metrics = self.path / "metrics.jsonl"
        """One row per logged step."""
        self.expert_load = self.path / "expert_load.jsonl"
        """Tokens per expert of about 500 steps; absent without experts."""
        self.logs = self.path / "logs"
        """Output of the ranks, one folder per attempt."""
        self.roofline = self.path / "roofline.json"
        """Achieved rates of the newest attempt against the peaks of its devices."""
        self.images = self.path / "images"
        """Images that parts of training drew, by step."""
        self.traces = self.path / "traces"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        """Weights as Hugging Face folders, by step."""
        self.stop = self.path / "stop"
        """Stop request: save and stop at the next step."""
        self.lock = self.path / ".lock"
        """Held by the process that may start and end attempts: the launcher, or rank 0 without one."""
        self.ranks_lock = self.path / ".lock.ranks"
        """Shared lock of all live ranks; still held after the launcher is killed."""
        self._last_heartbeat = -HEARTBEAT_SECONDS

    def attempt_logs(self, number: int) -> Path:
        """Log folder of attempt `number`, with the ranks' status records."""
        logs = self.logs / f"attempt-{number:03d}"
        return logs if self._world_logs is None else logs / self._world_logs

    def with_world(self, world_logs: str) -> "RunFolder":
        """The run folder as the ranks of a world see it."""
        return RunFolder(self.path, world_logs=world_logs)

    def world_logs(self, number: int) -> list[str]:
        """Names of the log folders of an attempt's worlds, in the order of their starts."""
        folders = self.attempt_logs(number).glob("group-*-start-*")
        return sorted((folder.name for folder in folders), key=lambda name: name.rpartition("-")[2])

    def make_attempt_logs(self, number: int) -> Path:
        """Create the log folder of attempt `number`; returns it. Raises OSError if the run folder is missing."""
        logs = self.attempt_logs(number)
        mkdir_below(self.path, logs)
        return logs

    def read_state(self) -> RunState | None:
        """Read state.json; None before the run folder is created. Raises UserError if it is damaged."""
        return read_json(self.state, RunState)

    def write_state(self, state: RunState, *, durable: bool = True) -> None:
        """Replace state.json; without `durable` the caller syncs the folder."""
        write_atomically(self.state, concealed(json.dumps(asdict(state))) + "\n", durable=durable)

    def beat(self, step: int, *, force: bool = False, warning: str | None = None) -> bool:
        """Write a heartbeat after `step` steps, at most one per second unless `force`; returns True if written. On a
        full disk, the file is overwritten in place, which needs no space."""
        now = time.monotonic()
        if not force and now - self._last_heartbeat < HEARTBEAT_SECONDS:
            return False
        self._last_heartbeat = now
        text = concealed(json.dumps({"step": step, "time": time.time(), "warning": warning})) + "\n"
        try:
            write_atomically(self.heartbeat, text, durable=False)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            overwrite(self.heartbeat, text)
        return True

    def read_heartbeat(self) -> Heartbeat | None:
        """Read the last heartbeat; None before the first, or if it is damaged: the next one replaces it."""
        with suppress(UserError):
            return read_json(self.heartbeat, Heartbeat)
        return None

    def warning(self) -> str | None:
        """Warning for the user of the newest attempt; None if there is none. It outlives the attempt."""
        with suppress(OSError):
            if os.statvfs(self.path).f_flag & os.ST_RDONLY:
                lost = "so the run cannot write a checkpoint, a metric or its state"
                return f"{self.path} is on a read-only disk, {lost}"
        beat, state = self.read_heartbeat(), self.read_state()
        began = state.time if state is not None and state.state in ("pending", "running") else 0.0
        return None if beat is None or beat.time < began else beat.warning

    def stop_requested(self) -> bool:
        """True if the ranks should save and stop. Ranks may see it at different steps and must agree on one."""
        return self.stop.exists()

    def request_stop(self, reason: str) -> None:
        """Request save-and-stop of the ranks; the first reason is kept."""
        if not self.stop.exists():
            write_atomically(self.stop, concealed(reason) + "\n")

    def stop_reason(self) -> str | None:
        """Reason of the stop request; None without one."""
        try:
            return read_text(self.stop).strip()
        except FileNotFoundError:
            return None

    def clear_stop(self) -> None:
        """Remove a stop request; called before each start."""
        self.stop.unlink(missing_ok=True)

    def read_attempts(self) -> list[Attempt]:
        """Read all attempts, oldest first, one per number. A damaged line keeps the fields that can still be read, and
        says that it is damaged. Raises UserError if the file cannot be read."""
        rows: dict[int, Attempt] = {}
        with suppress(FileNotFoundError):
            for line_number, line in enumerate(read_lines(self.attempts), 1):
                row = _attempt(line, f"line {line_number} of {self.attempts.name} is damaged", max(rows, default=0) + 1)
                rows[row.attempt] = row
        return [rows[number] for number in sorted(rows)]

    def add_attempt(self, *, world_size: int, hosts: Sequence[str], **fields: Any) -> Attempt:
        """Record an attempt before its submission; `fields` are further fields of Attempt. Returns the row."""
        with self._attempts_lock():
            rows = self.read_attempts()
            number, intent = rows[-1].attempt + 1 if rows else 1, time.time()
            row = Attempt(number, intent, world_size=world_size, hosts=tuple(hosts), **fields)
            self._write_attempts([*rows, row])
        return row

    def update_attempt(self, number: int, **fields: Any) -> Attempt:
        """Set fields of attempt `number`; returns the new row. A row whose file was deleted is added again."""
        with self._attempts_lock():
            rows = {row.attempt: row for row in self.read_attempts()}
            row = replace(rows.get(number) or Attempt(number, intent=time.time()), **fields)
            rows[number] = row
            self._write_attempts([rows[each] for each in sorted(rows)])
        return row

    def _attempts_lock(self) -> FileLock:
        lock = FileLock(self.path / f".{self.attempts.name}.lock")
        lock.acquire(timeout=LOCK_TIMEOUT)
        return lock

    def _write_attempts(self, rows: Sequence[Attempt]) -> None:
        write_atomically(self.attempts, concealed("".join(json.dumps(asdict(row)) + "\n" for row in rows)))

    def claim(self, role: str, *, timeout: float = 0.5) -> FileLock:
        """Acquire the run lock, held until release or process exit. Raises LockedError if another process holds it.
        `timeout` in seconds covers processes that query the holder and hold the lock briefly."""
        lock = FileLock(self.lock)
        lock.acquire(role, timeout=timeout)
        return lock

    def join(self, rank: int, *, timeout: float = 10.0) -> FileLock:
        """Acquire the shared lock of live ranks; `timeout` covers launchers that check for ranks."""
        lock = FileLock(self.ranks_lock)
        lock.acquire("rank 0" if rank == 0 else None, shared=True, timeout=timeout)
        return lock

    def ranks_alive(self) -> bool:
        """True if a rank of any attempt is still running."""
        return is_held(self.ranks_lock, shared=True)

    def holder(self) -> LockHolder | None:
        """Process that holds the run lock, else the live rank 0; None without either."""
        if is_held(self.lock):
            return FileLock(self.lock).holder()
        return FileLock(self.ranks_lock).holder() if self.ranks_alive() else None


def is_readable_run(path: Path) -> bool:
    """True for a run folder whose configuration this user may read."""
    return os.access(path / "config.yaml", os.R_OK)


def readable_runs(folder: Path) -> list[Path]:
    """Run folders in a folder, by name; none if the folder is missing or closed to this user."""
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return []
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and is_readable_run(path)]
