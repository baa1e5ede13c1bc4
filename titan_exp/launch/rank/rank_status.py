"""Rank status, and the watchdog that ends a rank whose parents are gone."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.run_folder import DONE, STOPPED, RunFolder, read_json, write_atomically

FALLBACK_FOLDER = "TITAN_EXP_SPARE"
"""Environment variable: folder on another disk for the record, used if the run folder is missing or its disk is
full."""


FAILURE_MARK = "titan_exp: this rank failed"
"""Line in a rank's log before its traceback. The launcher shows the log up to this line, and the traceback
separately."""
HANG, FOLDER_LOST = "Hung", "FolderLost"
"""Error types that concern the run rather than one rank."""


@dataclass(frozen=True)
class RankError:
    """Error that ended a rank."""

    type: str
    """Class name of the exception."""
    message: str
    traceback: str
    user: bool
    """True for a UserError and an Outcome, whose message needs no traceback."""

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
    """First signal that asked this rank to stop. Since srun sends SIGTERM first, a rank without a signal and without an
    end was not killed by srun."""

    @property
    def failed(self) -> bool:
        """True if the rank ended with an exit code other than DONE and STOPPED."""
        return self.exit not in (None, DONE, STOPPED)


def write_record(folder: RunFolder, attempt: int, record: RankRecord) -> None:
    """Write a rank's record beside the attempt's logs; if that fails, into the fallback folder."""
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
    """Read a rank's record, trying the fallback folder first; None before its start, or if the record is damaged."""
    for logs in (fallback, folder.attempt_logs(attempt)):
        if logs is None:
            continue
        with contextlib.suppress(UserError):  # damaged, which counts as if the rank had not started
            if (record := read_json(logs / _name(rank), RankRecord)) is not None:
                return record
    return None


def _name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


POLL_INTERVAL = 0.25
GRACE = 3.0
"""Seconds that an orphaned rank has to fail by itself after a peer failed."""
SAVE_LIMIT = 600.0
"""Seconds that an orphaned rank has to save, since no user can press Ctrl-C twice."""


class ParentWatchdog(threading.Thread):
    """Watchdog thread, running until the process exits.

    `launcher` and `controller` are the pids of the grandparent and parent process; `give_up(reason)` exits this
    process, and `on_orphaned()` may do so once the launcher has exited.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        launcher: int,
        controller: int,
        give_up: Callable[[str], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        super().__init__(name="titan_exp parent watchdog", daemon=True)
        self.orphaned = False
        """True if the launcher has exited."""
        self._folder, self._attempt, self._rank, self._world_size = folder, attempt, rank, world_size
        self._launcher, self._controller, self._give_up = launcher, controller, give_up
        self._on_orphaned = on_orphaned

    def run(self) -> None:
        """Poll the parents. When a parent exits, even as a zombie, its child's parent pid changes."""
        while not self._launcher_is_gone():
            if os.getppid() != self._controller:
                self._give_up("the parent process of the ranks (submitit's controller) is gone")
            time.sleep(POLL_INTERVAL)
        self.orphaned = True
        with contextlib.suppress(OSError):  # on a full disk nothing can be saved; the limit below ends the rank
            self._folder.request_stop("the launcher is gone")
        self._on_orphaned()
        self._end_as_orphan()

    def _launcher_is_gone(self) -> bool:
        try:
            return psutil.Process(self._controller).ppid() != self._launcher
        except psutil.Error:
            return False  # the controller has exited; checked next

    def _end_as_orphan(self) -> None:
        """Wait until this rank has saved. Exit if a peer failed, since this rank's collectives would block forever."""
        began, peer_died = time.monotonic(), None
        while True:
            now = time.monotonic()
            if os.getppid() != self._controller:
                self._give_up("the launcher and the parent process of the ranks are gone")
            if peer_died is None and self._has_peer_died():
                peer_died = now
            if peer_died is not None and now - peer_died > GRACE:
                self._give_up("the launcher is gone and another rank died")
            if now - began > SAVE_LIMIT:
                self._give_up(f"the launcher is gone and saving took longer than {SAVE_LIMIT:.0f} s")
            time.sleep(POLL_INTERVAL)

    def _has_peer_died(self) -> bool:
        try:
            siblings = psutil.Process(self._controller).children()
            alive = {sibling.pid for sibling in siblings if sibling.status() != psutil.STATUS_ZOMBIE}
        except psutil.Error:
            return False  # processes have changed; retried at the next poll
        for rank in set(range(self._world_size)) - {self._rank}:
            record = read_record(self._folder, self._attempt, rank)
            if record is not None and (record.failed or (record.exit is None and record.pid not in alive)):
                return True
        return False
