"""Signals to the launcher: the first requests a stop, a second one ends everything."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEBOUNCE = 0.5
"""Seconds within which signals count as one: a tool may signal both the process and its group."""


class Interrupts:
    """Counts Ctrl-C (SIGINT), SIGTERM and a closed terminal (SIGHUP) inside the block.

    A process that ignores SIGHUP, as under nohup, keeps ignoring it. Outside the main thread nothing is caught.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        """Name of the first signal; None so far."""
        self.again = False
        """True if another signal followed."""
        self._time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _count(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._time = signal.Signals(number).name, now
        elif now - self._time > DEBOUNCE:
            self.again = True


@contextlib.contextmanager
def block_terminal_signals() -> Iterator[None]:
    """Hide the terminal's signals from processes started in the block; this process gets them after it."""
    terminal = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, terminal)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
