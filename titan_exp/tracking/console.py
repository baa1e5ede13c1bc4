"""Console sink of the launching process: a live display on a terminal, plain aligned lines elsewhere."""

import math
import time
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.extension import extensions
from titan_exp.tracking.display import format_count, format_duration, format_items
from titan_exp.tracking.run_folder.metrics_jsonl import Row, Value

EVALUATED = ("validation_loss", "validation_bits_per_byte")
EVALUATED += tuple(name for one in extensions().values() for name in one.metrics)
"""Metrics of an evaluation, in the order of a line."""


class ConsoleSink:
    """Prints rows as they arrive.

    On a terminal: a bar with step and time left, the latest metrics below it, and one permanent line per evaluation.
    Elsewhere (a file, a CI log): one line per row, at most one per `interval` seconds, and always the first, the last
    and every evaluation. The last line says how many rows were not printed. `sequences_after` gives the number of
    sequences in the first steps together; the time of a step is proportional to its sequences.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        title: str = "training",
        sequences_after: Callable[[int], int] = lambda steps: steps,
        console: Console | None = None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Terminal()
        self._total, self._title, self._interval, self._clock = total_steps, title, interval, clock
        self._row: Row | None = None
        self._warning: str | None = None
        self._evaluation: Row = {}
        self._unprinted: Row | None = None
        self._rows = self._lines = 0
        self._last_line = -math.inf
        self._eta = _Eta(total_steps, sequences_after, clock)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._display, refresh_per_second=4)
            self._live.start()

    def log(self, row: Row) -> None:
        """Print the row, or update the display."""
        self._row = row
        self._eta.take(row)
        evaluated = {name: value for name in EVALUATED if (value := row.get(name)) is not None}
        if self._live is not None:
            if evaluated:
                self._evaluation = evaluated
                self.note(f"step {row['step']}: {', '.join(_evaluated(row))}")
            return
        self._rows += 1
        if evaluated or self._clock() - self._last_line >= self._interval:
            self._print_line(row)
        else:
            self._unprinted = row

    def warn(self, warning: str | None) -> None:
        """Display a warning until it is None; without a terminal, print it once."""
        if self._live is None and (warning is None) != (self._warning is None):
            self._write(f"warning: {warning}" if warning else "the warning is over: the run writes checkpoints again")
        self._warning = warning

    def note(self, line: str) -> None:
        """Print a permanent line above the display."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(line)

    def close(self, state: str) -> None:
        """Print the last row and the final state."""
        if self._live is not None:
            self._title = f"{self._title}: {state}"
            self._live.refresh()
            self._live.stop()
            self._live = None
            return
        if self._unprinted is not None:
            self._print_line(self._unprinted)
        hidden = self._rows - self._lines
        more = f", {format_items(hidden, 'more row')} in metrics.jsonl" if hidden else ""
        self._write(f"{self._title}: {state}{more}")

    def _print_line(self, row: Row) -> None:
        self._unprinted = None
        self._lines += 1
        self._last_line = self._clock()
        width = len(str(self._total))
        fields = [f"step {row['step']:>{width}}/{self._total}", *_fields(row)]
        if (eta := self._eta.seconds) is not None:
            fields.append(f"{format_duration(round(eta))} left")
        self._write("  ".join(fields))

    def _write(self, line: str) -> None:
        # Bypasses rich, which would wrap the line at an assumed width.
        self._console.file.write(line + "\n")
        self._console.file.flush()

    def _display(self) -> RenderableType:
        step = int(self._row["step"] or 0) if self._row else 0
        eta = self._eta.seconds
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._total, completed=step, pulse=self._row is None and self._live is not None)
        left = "" if eta is None else f"  {format_duration(round(eta))} left"
        head.add_row(Text(self._title, style="bold"), bar, Text(f"{step}/{self._total}{left}"))
        newest = {**(self._row or {}), **self._evaluation}
        numbers = "  ".join(_fields(newest)) if self._row else "waiting for the first row"
        lines = [head, Text(numbers, style="dim")]
        if self._warning is not None:
            lines.append(Text(f"warning: {self._warning}", style="bold yellow"))
        return Group(*lines)


class _Eta:
    """Remaining seconds: the larger of a wall-clock and a throughput estimate. The clock includes evaluations and
    saves. Throughput stays correct if old rows of a running run arrive all at once."""

    def __init__(self, total_steps: int, sequences_after: Callable[[int], int], clock: Callable[[], float]) -> None:
        self._total, self._sequences_after, self._clock = total_steps, sequences_after, clock
        self._first: tuple[float, int] | None = None
        self.seconds: float | None = None

    def take(self, row: Row) -> None:
        step, now = int(row["step"] or 0), self._clock()
        done, estimates = self._sequences_after(step), []
        if self._first is None or done < self._first[1]:
            self._first = now, done
        elif done > self._first[1]:
            estimates.append((now - self._first[0]) / (done - self._first[1]))
        tokens, speed = row.get("tokens"), row.get("tokens_per_second")
        if tokens and speed and done:
            estimates.append(tokens / done / speed)
        if step >= self._total:
            self.seconds = None
        elif estimates:
            self.seconds = max(estimates) * (self._sequences_after(self._total) - done)


def _fields(row: Row) -> list[str]:
    speed, lr = row.get("tokens_per_second"), row.get("lr")
    rate = "-" if lr is None else f"{lr:.2e}"
    fields = [
        f"loss {_number(row.get('loss'))}",
        f"grad norm {_number(row.get('grad_norm'))}",
        f"lr {rate:>8}",
        f"{'-' if speed is None else format_count(speed):>6} tokens/s",
    ]
    memory, mfu = row.get("memory"), row.get("mfu")
    if memory is not None:
        fields.append(f"{memory:5.2f} GiB")
    if mfu is not None:
        fields.append(f"MFU {100 * mfu:4.1f} %")
    return fields + _evaluated(row)


def _evaluated(row: Row) -> list[str]:
    known = {name: value for name in EVALUATED if (value := row.get(name)) is not None}
    return [f"{name.replace('_', ' ')} {_number(value)}" for name, value in known.items()]


def _number(value: Value) -> str:
    """Format a number in six characters, unless it is far too large."""
    if value is None:
        return f"{'-':>6}"
    return f"{value:6.4f}" if abs(value) < 9.99995 else f"{value:6.3f}" if abs(value) < 99.9995 else f"{value:6.4g}"
