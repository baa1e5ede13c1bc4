"""Progress bar in bytes; periodic lines if the output is not a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.tracking.number_format import format_duration

INTERVAL = 5.0
"""Minimum seconds between two lines."""


ProgressCallback = Callable[[int, int], None]
"""Called with bytes done and total bytes."""


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
