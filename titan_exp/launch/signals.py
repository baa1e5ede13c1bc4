"""Launcher signals: the first requests a graceful stop, the second an immediate one."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

DEBOUNCE = 0.5
"""Debounce window in seconds: some tools signal both the process and its group."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP inside the block.

    An ignored SIGHUP (nohup) stays ignored. Outside the main thread no handler is installed.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        """Name of the first signal; None before it."""
        self.again = False
        """True after a second signal."""
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
    """Block SIGINT and SIGHUP for processes started in the block; this process receives them after it."""
    terminal = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, terminal)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
