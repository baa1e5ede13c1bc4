"""Status of runs and studies: state, step, loss, speed, time left."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Table

from titan_exp.config.command_line.options import take_flags
from titan_exp.launch.state.run_lookup import find_runs, find_study_folder, split_runs_folder
from titan_exp.launch.state.status_rows import StatusRow, status_rows
from titan_exp.launch.sweep.sweep_table import plain_console
from titan_exp.tracking.sinks.sink import Value

HELP_TEXT = """\
titan-exp status: how runs stand. Nothing is changed.

  titan-exp status                    every run under runs/, newest first
  titan-exp status NAME               the runs of a study, or of an experiment.name, in the study's order
  titan-exp status RUN ...            runs, by path, by the beginning of their id, or by STUDY/LABEL
  titan-exp status NAME --watch       again and again, until nothing waits or runs, or Ctrl-C
  titan-exp status NAME --json        for programs
  titan-exp status paths.runs=FOLDER  runs that lie elsewhere

A run is new, queued, running, done, failed, preempted (it saved and stopped, and may continue), or lost (its process
is gone without a record). GPU-hours are those that its starts took so far. Where a run was planned before it started,
"/predicted" is its speed over the predicted one, and "GiB/predicted" the memory of rank 0 (tensors on a GPU, the whole
process on a CPU) beside the predicted peak of the same.
"""
WATCH_EVERY = 2.0
"""Seconds between looks."""


def run(words: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags, rest = take_flags(words, ("--watch", "--json"), verb="status")
    runs, named = split_runs_folder(rest)
    if "--json" in flags:
        print(json.dumps([asdict(row) for row in status_rows(find_runs(named, runs))], indent=1))
        return 0
    if "--watch" in flags:
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
            if record.skipped:
                lines.append(f"{len(record.skipped)} point(s) are skipped: titan-exp sweep {word} --dry-run says why")
            if (holder := study.holder()) is not None:
                lines.append(f"being run by {holder}")
    return lines


def _table(rows: Sequence[StatusRow], *, in_full: bool) -> Table:
    several = in_full or len({row.group for row in rows}) > 1
    with_hours = any(row.gpu_hours is not None for row in rows)
    with_mfu = any(row.mfu is not None for row in rows)
    headings: dict[str, Any] = {
        "run": lambda row: (
            (f"{row.group}/{row.label}" if several and "/" not in row.label else row.label)
            + (" (removed)" if row.removed else "")
        ),
        "id": lambda row: row.run_id,
        "state": lambda row: row.state,
        "step": lambda row: f"{row.step}/{'?' if row.steps is None else row.steps}",
        "loss": lambda row: _number(row.loss, ".4f"),
        "tokens/s": lambda row: _number(row.tokens_per_second, ",.0f"),
        "/predicted": lambda row: _share(row.tokens_per_second, row.tokens_per_second_predicted),
        "MFU": lambda row: _number(row.mfu, ".1%"),
        "GiB/predicted": lambda row: _beside(row.memory, row.memory_predicted),
        "left": lambda row: "-" if row.seconds_left is None else _duration(row.seconds_left),
        "GPU-hours": lambda row: _number(row.gpu_hours, ",.2f"),
        "reason": lambda row: (row.reason or "").partition("\n")[0],
    }
    hidden = {
        "/predicted": any(row.tokens_per_second_predicted is not None for row in rows),
        "GiB/predicted": any(row.memory_predicted is not None for row in rows),
        "MFU": with_mfu,
        "GPU-hours": with_hours,
        "reason": any(row.reason for row in rows),
    }
    for metric in sorted({metric for row in rows for metric in row.reported}):
        headings[metric] = lambda row, metric=metric: _number(row.reported.get(metric), ".4g")
    headings["reason"] = headings.pop("reason")
    shown = [name for name in headings if hidden.get(name, True)]
    table = Table(box=None, pad_edge=False)
    for name in shown:
        left = name in ("run", "id", "state", "reason")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name in ("id", "state"))
    for row in rows:
        table.add_row(*(headings[name](row) for name in shown))
    return table


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
                if not busy and not any(row.state in ("queued", "running") for row in rows):
                    return
                time.sleep(WATCH_EVERY)
    except KeyboardInterrupt:
        return


def _number(value: Value, form: str) -> str:
    return "-" if value is None else format(value, form)


def _share(measured: Value, predicted: Value) -> str:
    return "-" if not measured or not predicted else f"{measured / predicted:.0%}"


def _beside(measured: Value, predicted: Value) -> str:
    return "-" if predicted is None else f"{_number(measured, '.2f')}/{predicted:.2f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
