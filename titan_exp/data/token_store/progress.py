"""How far tokenizing is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LINE_EVERY_SECONDS = 10.0


class Progress:
    """Counts of one command, shown while it runs.

    Args:
        parts: all of the store's.
        done: those that are finished already.
        documents: all of the source's; None where only reading tells.
    """

    def __init__(self, parts: int, done: int, documents: int | None) -> None:
        self._parts, self._done, self._total = parts, done, documents
        self._documents = self._tokens = 0
        self._begin = self._said = time.monotonic()
        self._bar = None

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show it until the block ends."""
        if not sys.stderr.isatty():
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            self._bar, self._task = bar, bar.add_task("", total=self._parts, completed=self._done)
            yield self

    def add(self, documents: int, tokens: int, parts: int) -> None:
        """Count what was done since."""
        self._documents += documents
        self._tokens += tokens
        self._done += parts
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=str(self))
        elif time.monotonic() - self._said > _LINE_EVERY_SECONDS:
            self._said = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._begin, 1e-3)
        of = "" if self._total is None else f" of {self._total:,}"
        return (
            f"part {self._done} of {self._parts}, {self._documents:,}{of} documents, {self._tokens:,} tokens, "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )
