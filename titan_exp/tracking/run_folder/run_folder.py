"""The run folder, the interface between launching, training and comparing: everything about a run is a file in it.

Rank 0 and the launcher write; anyone may read at any time, and a death at any instant leaves every file whole.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.attempts import Attempt, AttemptLog
from titan_exp.tracking.run_folder.file_lock import FileLock, Holder, LockedError, is_held
from titan_exp.tracking.run_folder.state import Heartbeat, RunState, parse_state, read_json

__all__ = ["Attempt", "Heartbeat", "Holder", "LockedError", "RunFolder", "RunState", "write_atomically"]

BEAT_EVERY = 1.0
"""Seconds between heartbeats at least; a step may take less than a write to a network disk."""


class RunFolder:
    """The folder at `path`: names of its entries, and the small files that say how the run is doing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        """The folder."""
        self.config = self.path / "config.yaml"
        """The fully resolved configuration."""
        self.overrides = self.path / "overrides.yaml"
        """What was typed."""
        self.code = self.path / "code.json"
        """Commit, dirty or not, branch."""
        self.diff = self.path / "diff.patch"
        """What differs from the commit."""
        self.env = self.path / "env.json"
        """Versions and hardware."""
        self.plan = self.path / "plan.json"
        """What was predicted of it before its newest start."""
        self.attempts = self.path / "attempts.jsonl"
        """One row per start."""
        self.state = self.path / "state.json"
        """What the run is doing."""
        self.heartbeat = self.path / "heartbeat"
        """Last sign of life of rank 0."""
        self.metrics = self.path / "metrics.jsonl"
        """One row per logged step."""
        self.logs = self.path / "logs"
        """What processes printed, one folder per attempt."""
        self.roofline = self.path / "roofline.json"
        """What the newest attempt achieved of what its devices can do."""
        self.traces = self.path / "traces"
        """Profiler traces."""
        self.checkpoints = self.path / "checkpoints"
        """Saved states."""
        self.export = self.path / "export"
        """Weights as Hugging Face folders, by step."""
        self.stop = self.path / "stop"
        """Flag: save and stop at the next step."""
        self.lock = self.path / ".lock"
        """Held by the one process that may start and end attempts: the launcher, or rank 0 where there is none."""
        self.ranks_lock = self.path / ".lock.ranks"
        """Held, shared, by every rank while it lives: it outlives a launcher that was killed."""
        self._attempt_log = AttemptLog(self.attempts)
        self._last_beat = -BEAT_EVERY

    def attempt_logs(self, number: int) -> Path:
        """Folder of what attempt `number` printed and how its ranks ended."""
        return self.logs / f"attempt-{number:03d}"

    def read_state(self) -> RunState | None:
        """What the run is doing; None before it was committed."""
        return parse_state(self.state)

    def write_state(self, state: RunState, *, durable: bool = True) -> None:
        """Replace state.json; without `durable` somebody else waits until the disk has it."""
        write_atomically(self.state, json.dumps(asdict(state)) + "\n", durable=durable)

    def beat(self, step: int, *, force: bool = False) -> None:
        """Say that rank 0 lives and has done `step` steps; between two writes lies a second unless `force`."""
        now = time.monotonic()
        if force or now - self._last_beat >= BEAT_EVERY:
            self._last_beat = now
            text = json.dumps({"step": step, "time": time.time()}) + "\n"
            write_atomically(self.heartbeat, text, durable=False)

    def read_heartbeat(self) -> Heartbeat | None:
        """The last sign of life; None before the first."""
        fields = read_json(self.heartbeat)
        return None if fields is None else Heartbeat(**fields)

    def stop_requested(self) -> bool:
        """Whether the ranks shall save and stop. Ranks may see it at different steps and must agree on one."""
        return self.stop.exists()

    def request_stop(self, reason: str) -> None:
        """Ask the ranks to save and stop; the first reason given is kept."""
        if not self.stop.exists():
            write_atomically(self.stop, reason + "\n")

    def stop_reason(self) -> str | None:
        """Why a stop was requested; None if it was not."""
        try:
            return self.stop.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def clear_stop(self) -> None:
        """Forget a request to stop; done before each start."""
        self.stop.unlink(missing_ok=True)

    def read_attempts(self) -> list[Attempt]:
        """Every start so far, oldest first."""
        return self._attempt_log.read()

    def add_attempt(
        self,
        *,
        world_size: int,
        hosts: Sequence[str],
        job_id: str | None = None,
        launched_by: str = "local",
        **fields: Any,
    ) -> Attempt:
        """Write down the intent to start once more, before anything is submitted, with any further fields of the row;
        returns the new row."""
        return self._attempt_log.add(
            world_size=world_size, hosts=hosts, job_id=job_id, launched_by=launched_by, **fields
        )

    def update_attempt(self, number: int, **fields: Any) -> Attempt:
        """Fill in fields of attempt `number`; returns the row as it is now."""
        return self._attempt_log.update(number, **fields)

    def claim(self, role: str, *, timeout: float = 0.5) -> FileLock:
        """Become the one process that may start this run, until the lock is released or the process dies.

        Whoever only asks for the holder takes the lock for an instant, hence the time-out in seconds.

        Raises:
            LockedError: another process is.
        """
        lock = FileLock(self.lock)
        lock.acquire(role, timeout=timeout)
        return lock

    def join(self, rank: int, *, timeout: float = 10.0) -> FileLock:
        """Hold the folder as a rank of the running attempt. A launcher that looks holds it for an instant only."""
        lock = FileLock(self.ranks_lock)
        lock.acquire("rank 0" if rank == 0 else None, shared=True, timeout=timeout)
        return lock

    def ranks_alive(self) -> bool:
        """Whether a rank of any attempt still runs."""
        return is_held(self.ranks_lock, shared=True)

    def holder(self) -> Holder | None:
        """The process that claimed the folder or, if none does now, the rank 0 that still runs in it."""
        if is_held(self.lock):
            return FileLock(self.lock).holder()
        return FileLock(self.ranks_lock).holder() if self.ranks_alive() else None
