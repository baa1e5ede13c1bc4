"""Hang watchdog of a rank: warns without progress, then dumps stacks and exits with code 86.

It uses no collective: the first rank to detect the hang creates a flag file, and the others dump their stacks too. A
rank stuck in native code is dumped and killed by faulthandler's C timer.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable

from titan_exp.config.groups.run import ClusterConfig
from titan_exp.launch.health.hang_report import (
    RECORDER_SIZE,
    REPORT_TIMEOUT,
    HangFiles,
    rank_stack,
    read_flight_recorder,
)
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.progress import STEP, ProgressSnapshot, ProgressTracker

POLL_INTERVAL = 1.0
"""Maximum seconds between polls."""
OTHER_PHASE_FACTOR = 3.0
"""Limit multiplier for phases other than a regular step."""
MEDIAN_FACTOR = 10.0
"""Minimum limit of a regular step, in multiples of the median step time."""
WARN_MEDIAN_FACTOR = 3.0
"""Minimum time before the warning in a regular step, likewise; below the limit, so that slow steps warn first."""
NATIVE_GRACE = 5.0
"""Seconds past the limit before the C timer kills a rank that runs no Python."""
RECORDER_ENTRIES = "2000"
"""Default number of flight recorder entries."""


class Watchdog(threading.Thread):
    """Watchdog thread, running until `stop`. `give_up(reason)` exits the process, and `on_poll` may at every poll."""

    def __init__(
        self,
        config: ClusterConfig,
        files: HangFiles,
        *,
        rank: int,
        progress: ProgressTracker,
        give_up: Callable[[str], None],
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="titan_exp watchdog", daemon=True)
        self._warn, self._kill = _seconds(config.hang_warn_minutes), _seconds(config.hang_kill_minutes)
        self._files, self._rank, self._progress, self._give_up = files, rank, progress, give_up
        self._on_poll = on_poll
        limits = [limit for limit in (self._warn, self._kill) if limit is not None]
        self._poll_interval = min([POLL_INTERVAL, *(limit / 10 for limit in limits)])
        self._warned = self._hanging = False
        self._stopped = threading.Event()
        if self._kill is not None:
            os.environ.setdefault(RECORDER_SIZE, RECORDER_ENTRIES)
            files.logs.mkdir(exist_ok=True)
            # Kept open for faulthandler's C timer.
            self._stacks = files.stacks(rank).open("w", encoding="utf-8")

    def stop(self) -> None:
        """Stop the thread and remove an empty stack file.

        Blocks while this rank exits as hung, so that an error caused by peers that have already exited is not recorded
        as the cause.
        """
        self._stopped.set()
        while self._hanging:
            time.sleep(POLL_INTERVAL)
        if self._kill is not None:
            faulthandler.cancel_dump_traceback_later()
            with contextlib.suppress(OSError):
                if self._stacks.tell() == 0 and not self._files.is_declared():
                    self._files.stacks(self._rank).unlink(missing_ok=True)

    def run(self) -> None:
        """Poll until stopped."""
        while not self._stopped.is_set():
            self._on_poll()
            position = self._progress.snapshot()
            # Before the end, also where this thread polls late.
            self._warn_if_late(position)
            if self._kill is not None:
                left = limit(self._kill, position) - position.seconds
                if left <= 0 or self._is_declared(position):
                    self._hung()
                    return
                # Before the first rank to detect the hang has waited for the others' records.
                last = left + min(NATIVE_GRACE, self._kill / 2)
                faulthandler.dump_traceback_later(last, exit=True, file=self._stacks)
            self._stopped.wait(self._poll_interval)

    def _is_declared(self, position: ProgressSnapshot) -> bool:
        """True if another rank has declared a hang. Checked only without recent progress."""
        assert self._kill is not None
        return position.seconds > self._kill / 4 and self._files.is_declared()

    def _warn_if_late(self, position: ProgressSnapshot) -> None:
        late = self._warn is not None and position.seconds > limit(self._warn, position, WARN_MEDIAN_FACTOR)
        if late and not self._warned:
            consequence = "" if self._kill is None else (
                f"; after {limit(self._kill, position):.0f} s the run is ended as hung (cluster.hang_kill_minutes)"
            )  # fmt: skip
            get_logger().warning(
                "rank %d: no progress for %.0f s in %s after step %d%s",
                self._rank, position.seconds, position.phase, position.step, consequence,
            )  # fmt: skip
        self._warned = late

    def _hung(self) -> None:
        """Write this rank's stack record, wait for the other ranks' records, and exit."""
        self._hanging = True
        # Kills the process if the code below hangs too.
        faulthandler.dump_traceback_later(2 * REPORT_TIMEOUT, exit=True, file=self._stacks)
        position = self._progress.snapshot()
        first = False
        with contextlib.suppress(OSError):
            first = self._files.declare()
        self._write(position)
        self._give_up(self._reason(first, position))

    def _write(self, position: ProgressSnapshot) -> None:
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        recorder = read_flight_recorder()
        with contextlib.suppress(OSError):
            if recorder is not None:
                self._files.recorder(self._rank).write_text(json.dumps(recorder, indent=1), encoding="utf-8")
            self._files.write_rank_stack(
                rank_stack(position, rank=self._rank, host=socket.gethostname(), pid=os.getpid(), recorder=recorder)
            )

    def _reason(self, first: bool, position: ProgressSnapshot) -> str:
        """Headline of the hang report, written by the first rank once the others have reported."""
        files = self._files
        deadline = time.monotonic() + min(REPORT_TIMEOUT, self._kill or REPORT_TIMEOUT) * (1.0 if first else 1.5)
        done = files.all_reported if first else files.report.exists
        while not done() and time.monotonic() < deadline:
            time.sleep(0.1)
        hang = files.report_hang() if first or files.report.exists() else None
        return f"hung at step {position.at} in {position.phase}" if hang is None else hang.headline


def limit(seconds: float, position: ProgressSnapshot, median_factor: float = MEDIAN_FACTOR) -> float:
    """Seconds without progress before action, by phase; `seconds` is the configured limit of a regular step."""
    if position.phase == STEP:
        return max(seconds, median_factor * position.median_step_seconds)
    return OTHER_PHASE_FACTOR * seconds


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60.0 * minutes
