import io
import math
import re
from typing import Any

import pytest
from rich.console import Console

from titan_exp.tracking.console import ConsoleSink
from titan_exp.tracking.run_folder.metrics_jsonl import Row


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def row(step: int, **also: float | None) -> Row:
    known = {
        "step": step,
        "tokens": step * 1000,
        "loss": 2.0,
        "grad_norm": 0.5,
        "lr": 3e-3,
        "tokens_per_second": 12_345.0,
        "memory": 0.41,
        "mfu": None,
    }
    return {**known, **also}


class RunConsole:
    """A console sink, its output, and its clock."""

    def __init__(self, total: int = 100, *, terminal: bool = False, **options: Any) -> None:
        self.clock, self.text = Clock(), io.StringIO()
        console = Console(file=self.text, force_terminal=terminal, width=120, color_system=None)
        self.sink = ConsoleSink(total, title="first", console=console, clock=self.clock, **options)

    def log(self, *rows: Row, seconds: float = 10.0) -> None:
        for row in rows:
            self.clock.now += seconds
            self.sink.log(row)

    def lines(self) -> list[str]:
        return self.text.getvalue().splitlines()

    def steps(self) -> list[int]:
        return [int(found[1]) for line in self.lines() if (found := re.match(r"step +(\d+)/", line))]


def test_plain_line_is_not_wrapped_or_coloured() -> None:
    screen = RunConsole()
    screen.log(row(7, mfu=0.412, validation_loss=1.5))
    assert screen.lines() == [
        "step   7/100  loss 2.0000  grad norm 0.5000  lr 3.00e-03  12.35k tokens/s   0.41 GiB  MFU 41.2 %  "
        "validation loss 1.5000  8s left"
    ]


def test_plain_lines_align_with_unknown_values() -> None:
    screen = RunConsole()
    unknown = dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_second"))
    screen.log(row(1, **unknown), row(10, tokens_per_second=9.5), row(100, tokens_per_second=1_234_567.0, loss=12.5))
    assert len({line.index("GiB") for line in screen.lines()}) == 1
    screen.log(row(100, loss=math.nan))
    assert "loss    nan" in screen.lines()[-1]


def test_quick_steps_print_first_last_and_evaluations() -> None:
    screen = RunConsole()
    screen.log(*(row(step, validation_loss=1.0 if step == 13 else None) for step in range(1, 100)), seconds=0.1)
    screen.sink.close("done")
    steps = screen.steps()
    assert {1, 13, 99} <= set(steps)
    assert steps == sorted(set(steps))
    assert len(steps) <= 13
    assert screen.lines()[-1] == f"first: done, {99 - len(steps)} more rows in metrics.jsonl"


def test_slow_steps_are_all_printed() -> None:
    screen = RunConsole()
    screen.log(*(row(step) for step in range(1, 6)), seconds=1.0)
    assert screen.steps() == [1, 2, 3, 4, 5]
    screen.sink.close("done")
    assert screen.lines()[-1] == "first: done"


def test_notes_are_not_formatted() -> None:
    screen = RunConsole()
    screen.sink.note("[bold]not markup[/bold] " + "x" * 200)
    assert screen.lines() == ["[bold]not markup[/bold] " + "x" * 200]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        (10.0, "1m 40s left"),  # the wall clock: evaluations and saves make it longer than throughput says
        (0.0, "20s left"),  # all rows at once, as when joining a run: only throughput knows
    ],
)
def test_time_left(seconds: float, left: str) -> None:
    screen = RunConsole(total=20)
    screen.log(*(row(step, tokens_per_second=500.0) for step in (8, 9, 10)), seconds=seconds)
    screen.sink.close("done")
    assert screen.lines()[-2].endswith(left)


def test_time_left_of_a_run_whose_batches_grow() -> None:
    """Ten steps of 2 sequences, 5 s each, and ten of 4."""
    screen = RunConsole(total=20, sequences_after=lambda steps: 2 * steps + 2 * max(0, steps - 10))
    screen.log(*(row(step, tokens_per_second=500.0) for step in (8, 9, 10)))
    screen.sink.close("done")
    assert screen.lines()[-2].endswith("3m 20s left")


def test_a_terminal_shows_a_bar_the_newest_numbers_and_permanent_lines() -> None:
    screen = RunConsole(terminal=True)
    screen.sink.note("started [ok]")
    screen.log(row(50, mfu=0.412), row(60, validation_loss=1.25), row(100, loss=0.75))
    screen.sink.close("done")
    text = screen.text.getvalue()
    assert "started [ok]" in text
    assert "step 60: validation loss 1.2500" in text
    last = text[text.rindex("first: done") :]
    assert "100/100" in last
    assert "loss 0.7500" in last
    assert "validation loss 1.2500" in last
    assert "12.35k tokens/s" in last
    assert "left" not in last
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_terminal_shows_progress_while_it_waits_for_the_first_row() -> None:
    screen = RunConsole(terminal=True)
    screen.sink.close("failed")
    assert "waiting for the first row" in screen.text.getvalue()
    assert "0/100" in screen.text.getvalue()


def test_warning_is_printed_once_and_stays_on_a_terminal() -> None:
    lines = RunConsole()
    for warning in (None, "no checkpoint", "no checkpoint at step 2", None, None):
        lines.sink.warn(warning)
    assert lines.lines() == [
        "warning: no checkpoint",
        "the warning is over: the run writes checkpoints again",
    ]
    screen = RunConsole(terminal=True)
    screen.sink.warn("no checkpoint")
    screen.sink.close("failed")
    assert "warning: no checkpoint" in screen.text.getvalue()
