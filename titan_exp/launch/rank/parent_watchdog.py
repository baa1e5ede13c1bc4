"""A rank's watch over those who would otherwise look after it: its launcher, and submitit's controller, its parent.

Without the launcher nothing shows or stops the run, so the rank saves and stops. Without the controller it ends.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable

import psutil

from titan_exp.launch.rank.rank_status import read_record
from titan_exp.tracking.run_folder.run_folder import RunFolder

POLL_INTERVAL = 0.25
"""Seconds between looks."""
GRACE = 3.0
"""Seconds that an orphan waits for itself to fail after another rank died, before it gives up."""
SAVE_LIMIT = 600.0
"""Seconds that an orphan has for saving, since no user is left to press Ctrl-C twice."""


class ParentWatchdog(threading.Thread):
    """Runs beside the training until the process ends.

    Args:
        folder: of the run.
        attempt: number of this start.
        rank: this one.
        world_size: ranks in all.
        launcher: process number of the launcher, the controller's parent.
        controller: process number of the controller, this process's parent.
        give_up: ends this process; called with the reason.
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
    ) -> None:
        super().__init__(name="titan_exp watch", daemon=True)
        self.orphaned = False
        """True if the launcher is gone."""
        self._folder, self._attempt, self._rank, self._world_size = folder, attempt, rank, world_size
        self._launcher, self._controller, self._give_up = launcher, controller, give_up

    def run(self) -> None:
        """Look again and again. A parent that is gone shows by its child having another one, even as a zombie."""
        while not self._launcher_is_gone():
            if os.getppid() != self._controller:
                self._give_up("the process that held the ranks (submitit's controller) is gone")
            time.sleep(POLL_INTERVAL)
        self.orphaned = True
        with contextlib.suppress(OSError):  # on a full disk nothing can be saved, and the limit below ends the rank
            self._folder.request_stop("the launcher is gone")
        self._end_as_orphan()

    def _launcher_is_gone(self) -> bool:
        try:
            return psutil.Process(self._controller).ppid() != self._launcher
        except psutil.Error:
            return False  # the controller is gone, which is looked at next

    def _end_as_orphan(self) -> None:
        """Let saving continue, but end a rank whose peers died: it would wait for ever, and no launcher is left."""
        began, peer_died = time.monotonic(), None
        while True:
            now = time.monotonic()
            if os.getppid() != self._controller:
                self._give_up("the launcher and the process that held the ranks are gone")
            if peer_died is None and self._a_peer_died():
                peer_died = now
            if peer_died is not None and now - peer_died > GRACE:
                self._give_up("the launcher is gone and another rank died")
            if now - began > SAVE_LIMIT:
                self._give_up(f"the launcher is gone and saving took longer than {SAVE_LIMIT:.0f} s")
            time.sleep(POLL_INTERVAL)

    def _a_peer_died(self) -> bool:
        try:
            siblings = psutil.Process(self._controller).children()
            alive = {sibling.pid for sibling in siblings if sibling.status() != psutil.STATUS_ZOMBIE}
        except psutil.Error:
            return False  # looked at while it changed: the next look tells
        for rank in set(range(self._world_size)) - {self._rank}:
            record = read_record(self._folder, self._attempt, rank)
            if record is not None and (record.failed or (record.exit is None and record.pid not in alive)):
                return True
        return False
