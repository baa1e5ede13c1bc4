"""Run folder: all files of a run, and the interface between launching, training and comparing.

Rank 0 and the launcher write; any process may read at any time. Every file stays readable after a crash.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_text
from titan_exp.config.schema.foreign_code import SIGNATURE_FILE
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.attempts import Attempt, AttemptLog, Heartbeat, RunState, read_json
from titan_exp.tracking.run_folder.files import (
    FileLock,
    LockedError,
    LockHolder,
    is_held,
    mkdir_below,
    overwrite,
    write_atomically,
)

__all__ = ["Attempt", "Heartbeat", "LockHolder", "LockedError", "RunFolder", "RunState", "write_atomically"]

HEARTBEAT_SECONDS = 1.0
"""Minimum seconds between heartbeats; a step may be shorter than a write to a network disk."""


class RunFolder:
    """Paths of a run folder, and its state, heartbeat, attempts and locks.

    For the ranks of one of several worlds, `world_logs` names their folder below the attempt's logs.
    """

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
        self._attempt_log = AttemptLog(self.attempts)
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
        if force or now - self._last_heartbeat >= HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            text = concealed(json.dumps({"step": step, "time": time.time(), "warning": warning})) + "\n"
            try:
                write_atomically(self.heartbeat, text, durable=False)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                overwrite(self.heartbeat, text)
            return True
        return False

    def read_heartbeat(self) -> Heartbeat | None:
        """Read the last heartbeat; None before the first, or if it is damaged, in which case the next one replaces
        it."""
        with contextlib.suppress(UserError):
            return read_json(self.heartbeat, Heartbeat)
        return None

    def warning(self) -> str | None:
        """Warning for the user of the newest attempt; None if there is none. It outlives the attempt."""
        with contextlib.suppress(OSError):
            if os.statvfs(self.path).f_flag & os.ST_RDONLY:
                return (
                    f"{self.path} is on a read-only disk, so the run cannot write a checkpoint, a metric or its state"
                )
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
        """Read all attempts, oldest first."""
        return self._attempt_log.read()

    def add_attempt(self, *, world_size: int, hosts: Sequence[str], **fields: Any) -> Attempt:
        """Record an attempt before its submission; `fields` are further fields of Attempt. Returns the row."""
        return self._attempt_log.add(world_size=world_size, hosts=tuple(hosts), **fields)

    def update_attempt(self, number: int, **fields: Any) -> Attempt:
        """Set fields of attempt `number`; returns the new row."""
        return self._attempt_log.update(number, **fields)

    def claim(self, role: str, *, timeout: float = 0.5) -> FileLock:
        """Acquire the run lock, held until release or process exit. Raises LockedError if another process holds it.

        `timeout` in seconds covers processes that query the holder and hold the lock briefly.
        """
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
