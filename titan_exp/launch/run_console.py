"""Launcher console: progress, signals, and the summary of a run at its end."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from titan_exp.config.groups.training import TrainingConfig
from titan_exp.launch.rank.rank_env import FAILURE_MARK
from titan_exp.tracking.console import ConsoleSink
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, Row, Value, read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder, read_json, shown_state


class RunConsole:
    """Progress and log lines on stdout, errors on stderr."""

    def __init__(self) -> None:
        self._sink: ConsoleSink | None = None
        self._gone = False
        self._log_over = False

    def open(self, title: str, training: TrainingConfig) -> None:
        """Start the progress display of a run."""

        def start() -> None:
            steps, sequences = training.last_step, training.sequences_after
            self._sink = ConsoleSink(steps, title=title, sequences_after=sequences)

        self._try(start)

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

    def _try(self, action: Callable[..., object], *arguments: object) -> None:
        if self._gone:
            return
        try:
            action(*arguments)
        except OSError:
            self._gone = True
            # Later writes, including Python's flush at exit, go to /dev/null instead of failing.
            devnull = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(devnull, stream.fileno())
            os.close(devnull)


DEBOUNCE = 0.5  # debounce window in seconds, because some tools signal both the process and its group


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP inside the block, in the main thread. An ignored SIGHUP (nohup) stays so."""

    def __init__(self) -> None:
        self.first: str | None = None  # name of the first signal, or Ctrl-C; None before it
        self.again = False  # True after a second signal
        self._time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _count(self, number: int, _: FrameType | None) -> None:
        if self.first is None:
            self.first = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self._time = time.monotonic()
        elif time.monotonic() - self._time > DEBOUNCE:
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


@dataclass(frozen=True)
class Summary:
    """Final state and metrics of a run; None if unknown."""

    state: str
    step: int
    loss: Value  # last logged training loss, in nats per token
    validation_loss: Value
    tokens_per_second: Value  # throughput of the whole job at the last logged step, as in `titan-exp status`
    reason: str | None = None
    roofline: str | None = None  # roofline note of the newest finished attempt


def summarize(folder: RunFolder) -> Summary:
    """Read a run's summary from its folder."""
    state, rows = folder.read_state(), read_metrics(folder.metrics)
    step = state.step if state else 0
    if state and rows and rows[-1].get("attempt") == state.attempt:
        step = max(step, int(rows[-1]["step"] or 0))  # ahead of state.json if the disk is full
    return Summary(
        state=state.state if state else "pending",
        step=step,
        loss=_last(rows, "loss", step if state else None),
        validation_loss=_last(rows, "validation_loss", step if state else None),
        tokens_per_second=_last(rows, "tokens_per_second", None),
        reason=state.reason if state else None,
        roofline=str((read_json(folder.roofline) or {}).get("short") or "") or None,
    )


def describe(summary: Summary, total_steps: int) -> str:
    """Format the known fields as one line."""
    why = f" ({summary.reason})" if summary.state == "preempted" and summary.reason else ""
    state = f"{shown_state(summary.state, summary.reason)} after step {summary.step} of {total_steps}{why}"
    metrics = known_metrics(summary.loss, summary.validation_loss, summary.tokens_per_second)
    roofline = [summary.roofline] if summary.roofline is not None and summary.state == "done" else []
    return ", ".join([state, *metrics, *roofline])


def known_metrics(loss: Value, validation_loss: Value, tokens_per_second: Value) -> list[str]:
    """Format each of these metrics that is known."""
    texts = {"loss {:.4f}": loss, "validation loss {:.4f}": validation_loss, "{:,.0f} tokens/s": tokens_per_second}
    return [text.format(value) for text, value in texts.items() if value is not None]


def _last(rows: MetricRows, key: str, step: int | None) -> Value:
    """Last value, up to a step if one is given: later rows are of an attempt that saved none of it."""
    found = reversed(list(zip(rows.column("step"), rows.column(key), strict=True)))
    return next((value for at, value in found if value is not None and (step is None or int(at or 0) <= step)), None)
