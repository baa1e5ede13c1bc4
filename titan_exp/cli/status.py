"""Status of runs and studies: state, step, loss, speed, time left."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.live import Live
from rich.table import Table

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.verb_options import StatusOptions
from titan_exp.launch.executor import worlds_launch
from titan_exp.launch.state.run_lookup import find_runs, find_study_folder, named_runs, runs_folder
from titan_exp.launch.state.run_status import StatusRow, rung_lines, status_rows
from titan_exp.launch.sweep.sweep_table import plain_console
from titan_exp.tracking.number_format import format_duration
from titan_exp.tracking.sinks.sink import Value

USAGE = """\
titan-exp status: state, step, loss, speed and time left of runs. Changes nothing.

  titan-exp status                    every run under runs/, newest first
  titan-exp status NAME               the runs of a study, or of an experiment.name, in the study's order
  titan-exp status RUN ...            runs, by path, id prefix, STUDY/LABEL or URL
  titan-exp status paths.runs=FOLDER  runs of another folder

A run is new, queued, running, done, failed, preempted (it saved, stopped and can continue), lost (its process ended
without a record), or unknown (SLURM, which may hold its job, cannot be asked: the reason says why). GPU-hours are those
of all its starts, without a parent's. "continued from" is the parent of a continued run, and the step at which it
begins. For a planned run, "/predicted" is its speed over the predicted one, and "GiB/predicted" the memory of rank 0
(tensors on a GPU, the process on a CPU) beside the predicted peak."""
if (launch := worlds_launch()) is not None:
    USAGE += f" {launch.status_help}"
HELP_TEXT = options_help(USAGE, StatusOptions)
COLUMNS = (
    *("run", "id", "rung", "state", "step", "loss", "validation loss", "tokens/s"),
    *("/predicted", "MFU", "GiB/predicted", "left", "GPU-hours"),
)
OPTIONAL = ("rung", "validation loss", "/predicted", "MFU", "GiB/predicted", "GPU-hours")
WATCH_EVERY = 2.0
"""Refresh interval in seconds."""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(StatusOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if options.json:
        print(json.dumps([asdict(row) for row in status_rows(find_runs(named, runs))], indent=1))
        return 0
    if options.watch:
        _watch(named, runs)
        return 0
    rows = status_rows(find_runs(named, runs))
    if not rows:
        print(f"There is no run under {runs}/ yet. titan-exp train starts one; paths.runs=FOLDER looks elsewhere.")
        return 0
    console = plain_console()
    for line in _headlines(named, runs):
        console.print(line)
    console.print(_table(rows, in_full=not named))
    console.print(_count(rows))
    return 0


def _headlines(named: Sequence[str], runs: Path) -> list[str]:
    lines = []
    for word in named:
        study = find_study_folder(word, runs)
        record = None if study is None else study.read()
        if study is not None and record is not None:
            lines.append(f"{study.path.name}: {record.question}")
            lines += rung_lines(record, study)
            if record.skipped:
                lines.append(f"{len(record.skipped)} point(s) are skipped: titan-exp sweep {word} --dry-run says why")
            if (holder := study.holder()) is not None:
                lines.append(f"being run by {holder}")
    return lines


def _table(rows: Sequence[StatusRow], *, in_full: bool) -> Table:
    """Table of runs; optional columns are shown if a run has a value."""
    with_group = in_full or len({row.group for row in rows}) > 1
    cells = [_cells(row, with_group) for row in rows]
    names = [*COLUMNS, *dict.fromkeys(name for row in rows if row.groups is not None for name in row.groups.cells())]
    names += ["continued from", *sorted({metric for row in rows for metric in row.reported}), "reason"]
    fixed = set(COLUMNS).difference(OPTIONAL)
    shown = [name for name in names if name in fixed or any(row.get(name, "-") != "-" for row in cells)]
    table = Table(box=None, pad_edge=False)
    for name in shown:
        left = name in ("run", "id", "rung", "state", "continued from", "reason")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name in ("id", "state"))
    for row in cells:
        table.add_row(*(row.get(name, "-") for name in shown))
    return table


def _cells(row: StatusRow, with_group: bool) -> dict[str, str]:
    label = f"{row.group}/{row.label}" if with_group and "/" not in row.label else row.label
    speed, predicted, peak = row.tokens_per_second, row.tokens_per_second_predicted, row.memory_predicted
    return {
        "run": label + (" (removed)" if row.removed else ""),
        "id": row.run_id,
        "rung": "-" if row.rung is None else str(row.rung),
        "validation loss": "-" if row.rung is None else _number(row.validation_loss, ".4f"),
        "state": row.state,
        "step": f"{row.step}/{'?' if row.steps is None else row.steps}",
        "loss": _number(row.loss, ".4f"),
        "tokens/s": _number(speed, ",.0f"),
        "left": "-" if row.seconds_left is None else format_duration(row.seconds_left),
        "/predicted": f"{speed / predicted:.0%}" if speed and predicted else "-",
        "MFU": _number(row.mfu, ".1%"),
        "GiB/predicted": "-" if peak is None else f"{_number(row.memory, '.2f')}/{peak:.2f}",
        "GPU-hours": _number(row.gpu_hours, ",.2f"),
        **({} if row.groups is None else row.groups.cells()),
        "continued from": "-" if row.parent is None else f"{row.parent} at {row.parent_step}",
        **{metric: _number(value, ".4g") for metric, value in row.reported.items()},
        "reason": (row.reason or row.warning or "-").partition("\n")[0],
    }


def _count(rows: Sequence[StatusRow]) -> str:
    states = [row.state for row in rows]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    hours = sum(row.gpu_hours or 0.0 for row in rows)
    return f"{len(rows)} run(s): {', '.join(parts)}" + (f"; {hours:,.2f} GPU-hours so far" if hours else "")


def _watch(named: Sequence[str], runs: Path) -> None:
    console = plain_console()
    try:
        with Live(console=console, auto_refresh=False, screen=False) as live:
            while True:
                rows = status_rows(find_runs(named, runs))
                table = _table(rows, in_full=not named)
                table.caption, table.caption_justify = _count(rows), "left"
                live.update(table, refresh=True)
                busy = any(study.holder() for word in named if (study := find_study_folder(word, runs)) is not None)
                if not busy and not any(row.state in ("queued", "running", "unknown") for row in rows):
                    return
                time.sleep(WATCH_EVERY)
    except KeyboardInterrupt:
        return


def _number(value: Value, form: str) -> str:
    return "-" if value is None else format(value, form)
