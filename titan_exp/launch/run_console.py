"""Launcher console. A closed terminal or broken pipe does not end the run."""

import os
import sys
from collections.abc import Callable, Iterator

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.launch.rank.main import FAILURE_MARK
from titan_exp.tracking.sinks.console import ConsoleSink
from titan_exp.tracking.sinks.sink import Row


class RunConsole:
    """Progress and log lines on stdout, errors on stderr."""

    def __init__(self) -> None:
        self._sink: ConsoleSink | None = None
        self._gone = False
        self._log_over = False

    def open(self, title: str, training: TrainingConfig) -> None:
        """Start the progress display of a run."""
        self._try(lambda: setattr(self, "_sink", self._new_sink(title, training)))

    def row(self, row: Row) -> None:
        """Display a row of metrics."""
        if self._sink is not None:
            self._try(self._sink.log, row)

    def warn(self, warning: str | None) -> None:
        """Display a warning until it is None."""
        if self._sink is not None:
            self._try(self._sink.warn, warning)

    def log_lines(self, lines: Iterator[str]) -> None:
        """Print rank 0's log up to its traceback; the first failed rank's traceback is printed at the end."""
        for line in lines:
            self._log_over = self._log_over or line == FAILURE_MARK
            if not self._log_over:
                self.echo(line)

    def echo(self, line: str) -> None:
        """Print a line above the progress display."""
        if self._sink is not None:
            self._try(self._sink.note, line)
        else:
            self._try(lambda: print(line, flush=True))

    def error(self, text: str) -> None:
        """Print an error."""
        self._try(lambda: print(text, file=sys.stderr, flush=True))

    def close(self, state: str) -> None:
        """Close the progress display with the run's final state."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._try(sink.close, state)

    @staticmethod
    def _new_sink(title: str, training: TrainingConfig) -> ConsoleSink:
        return ConsoleSink(training.last_step, title=title, sequences_after=training.sequences_after)

    def _try(self, action: Callable[..., object], *arguments: object) -> None:
        if self._gone:
            return
        try:
            action(*arguments)
        except OSError:
            self._gone = True
            # Later writes, also Python's flush at exit, go to /dev/null instead of failing.
            devnull = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(devnull, stream.fileno())
            os.close(devnull)
