"""Tokenization progress: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LINE_INTERVAL_SECONDS = 10.0


class ProgressDisplay:
    """Progress of documents, tokens and finished parts; `documents` is None for a stream."""

    def __init__(self, parts: int, done: int, documents: int | None) -> None:
        self._parts, self._done, self._total = parts, done, documents
        self._documents = self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._bar = None

    @contextmanager
    def shown(self) -> Iterator["ProgressDisplay"]:
        """Show the counts during the `with` block."""
        if not sys.stderr.isatty():
            yield self
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from titan_exp.config.command_line.terminal import Terminal

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
            self._bar, self._task = bar, bar.add_task("", total=self._parts, completed=self._done)
            yield self

    def add(self, documents: int, tokens: int, parts: int) -> None:
        """Add to the counts."""
        self._documents += documents
        self._tokens += tokens
        self._done += parts
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=str(self))
        elif time.monotonic() - self._last_line > _LINE_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        total = "" if self._total is None else f" of {self._total:,}"
        return (
            f"part {self._done} of {self._parts}, {self._documents:,}{total} documents, {self._tokens:,} tokens, "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )
