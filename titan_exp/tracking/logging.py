"""Logging of ranks: rank 0 to standard output, warnings of others to one file each; and training progress in-process,
for the watchdog thread: step, phase, time since the last report.

A report costs one clock read.
"""

import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.secrets import concealed
from titan_exp.tracking.display import format_duration


def get_logger() -> logging.Logger:
    """Package logger."""
    return logging.getLogger("titan_exp")


def configure_logging(rank: int, logs: Path) -> None:
    """Configure logging: rank 0 logs to standard output, other ranks log warnings to `logs/rank-<rank>.log`. Warnings
    of Python and of libraries are included, each text once. A later call replaces an earlier one."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Formatter)]:
        root.removeHandler(handler)
        handler.close()
    handler: logging.Handler = _StreamHandler(sys.stdout)
    if rank != 0:
        logs.mkdir(exist_ok=True)
        # Created with the first warning, to avoid thousands of empty files.
        handler = _FileHandler(logs / f"rank-{rank}.log", delay=True)
        handler.setLevel(logging.WARNING)
    handler.setFormatter(_Formatter())
    handler.addFilter(_OnceFilter())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    get_logger().setLevel(logging.INFO)
    logging.captureWarnings(True)


class _Lossy(logging.Handler):
    """Drops lines that a full or read-only disk cannot take; logging itself would print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


class _StreamHandler(_Lossy, logging.StreamHandler[TextIO]):
    pass


class _FileHandler(_Lossy, logging.FileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        # With `delay`, the file is opened here, outside logging's own error handling.
        with suppress(OSError):
            super().emit(record)


class _Formatter(logging.Formatter):
    """Formats time, level of warnings and errors, and message, with secrets masked."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message.strip()}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return concealed(super().format(record))


class _OnceFilter(logging.Filter):
    """Passes each message of other libraries once, and all messages of titan_exp."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] == "titan_exp":
            return True
        text = record.getMessage()
        if text in self._seen:
            return False
        self._seen.add(text)
        return True


INTERVAL = 5.0  # minimum seconds between two lines


ProgressCallback = Callable[[int, int], None]  # called with bytes done and total bytes


@contextmanager
def byte_progress(title: str, console: Console | None = None) -> Iterator[ProgressCallback]:
    """Show progress for the duration of the block, on standard error by default."""
    console = console or Terminal(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _lines(title, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str, console: Console) -> ProgressCallback:
    began = shown = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= INTERVAL:
            shown = now
            speed = done / (now - began)
            left = format_duration((total - done) / max(speed, 1.0))
            console.print(f"{title}: {decimal(done)} of {decimal(total)}, {decimal(int(speed))}/s, {left} left")

    return report


START, STEP, FIRST_STEP = "the start", "the training step", "the first step"  # default phases; `phase` enters others
MEDIAN_WINDOW = 51  # steps in the median of step times


@dataclass(frozen=True)
class ProgressSnapshot:
    """Progress of a process at one moment."""

    step: int  # last finished step
    phase: str
    seconds: float  # seconds since the last report
    median_step_seconds: float  # median time between the ends of two steps; 0.0 before two steps have ended

    @property
    def at(self) -> int:
        """Current step: the one in training, or the last finished one during evaluation or saving."""
        return self.step + (self.phase in (STEP, FIRST_STEP))


class ProgressTracker:
    """Progress of one process, written by one thread and read by another. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One tuple, replaced as a whole, so that readers never see a partial update.
        self._now: tuple[int, str, float] = (0, START, clock())
        self._last_step_end: float | None = None
        self._times: deque[float] = deque(maxlen=MEDIAN_WINDOW)

    @property
    def has_stepped(self) -> bool:
        """True once this process has finished a step."""
        return self._last_step_end is not None

    def begin(self, step: int) -> None:
        """Start training after step `step`; the first step may compile, allocate and autotune."""
        self._now = (step, FIRST_STEP, self._clock())

    def step(self, step: int) -> None:
        """Report a finished step."""
        now = self._clock()
        if self._last_step_end is not None:
            self._times.append(now - self._last_step_end)
        self._last_step_end = now
        self._now = (step, STEP, now)

    def keep_alive(self) -> None:
        """Report progress within a long phase, such as a batch of an evaluation."""
        step, phase, _ = self._now
        self._now = (step, phase, self._clock())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a phase other than training for the block."""
        step, before, _ = self._now
        self._now = (step, name, self._clock())
        try:
            yield
        finally:
            self._now = (step, before, self._clock())

    def snapshot(self) -> ProgressSnapshot:
        """Return the current progress."""
        step, phase, since = self._now
        times = list(self._times)
        return ProgressSnapshot(step, phase, self._clock() - since, statistics.median(times) if times else 0.0)


PROGRESS = ProgressTracker()
