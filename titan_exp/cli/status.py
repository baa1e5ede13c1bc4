"""Show state, step, loss, speed and time left of runs and studies."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.cells import cell_len
from rich.live import Live
from rich.text import Text

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.command_line.verb_options import StatusOptions
from titan_exp.config.errors.user_error import listed
from titan_exp.launch.executor import worlds_launch
from titan_exp.launch.run_lookup import find_runs, find_study_folder, named_runs, runs_folder
from titan_exp.launch.run_status import StatusRow, count_states, rung_lines, status_rows
from titan_exp.tracking.display import format_duration, format_items
from titan_exp.tracking.run_folder.metrics_jsonl import Value

USAGE = """\
titan-exp status: show state, step, loss, speed and time left of runs. It changes nothing.

  titan-exp status                    every run under runs/, newest first
  titan-exp status NAME               the runs of a study, or of an experiment.name, in the study's order
  titan-exp status RUN ...            runs, by path, id prefix, STUDY/LABEL or URL
  titan-exp status paths.runs=FOLDER  runs of another folder

A run marked (not in the last call) is of a point that the newest titan-exp sweep did not ask for, and one marked
(removed) of a point that the study's file no longer has.

A run is new, queued, running, done or failed. It is stopped if it ended early in good order, after saving what
checkpoint= asks for (the reason says who or what stopped it), preempted if SLURM stopped it (--json says so of both),
lost if its process ended without a record, and unknown if SLURM may hold its job and does not answer (the reason says
why). GPU-hours count all its starts, and not those of a parent. "continued from" is the parent of a continued run,
and the step at which it begins. For a planned run, "/predicted" is its speed over the predicted one, and
"GiB/predicted" the memory of rank 0 (tensors on a GPU, the process on a CPU) beside the predicted peak."""
if (launch := worlds_launch()) is not None:
    USAGE += f"\n{launch.status_help}"
HELP_TEXT = options_help(USAGE, StatusOptions)
COLUMNS = (
    *("run", "id", "rung", "state", "step", "loss", "validation loss", "tokens/s"),
    *("/predicted", "MFU", "GiB/predicted", "left", "GPU-hours"),
)
FIXED: tuple[str, ...] = ("run", "state", "step", "loss")  # columns that every terminal shows
FIRST = ("left", "rung", "validation loss", "tokens/s", "id", "MFU", "GPU-hours", "/predicted", "GiB/predicted")
"""Other columns by importance; columns of worlds, parents and reported metrics come after them."""
LEFT = ("run", "id", "rung", "state", "continued from")  # text columns
GAP, LABEL, NAMED = 2, 24, 3
"""Spaces between columns; width below which no run's name is cut to make room; names in a list that is cut."""
WATCH_EVERY = 2.0


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(StatusOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if options.json:
        answer([asdict(row) for row in status_rows(find_runs(named, runs))])
        return 0
    if options.watch:
        _watch(named, runs)
        return 0
    rows = status_rows(find_runs(named, runs))
    if not rows:
        start = "Start one with titan-exp train, or look elsewhere with paths.runs=FOLDER."
        print(f"There is no run under {runs}/ yet. {start}")
        return 0
    width = _width()
    lines = [*_headlines(named, runs), *_lines(rows, in_full=not named, width=width)]
    print("\n".join([*lines, "", *_wrapped(_count(rows), width)]))
    return 0


def _width() -> int | None:
    """Columns of the terminal, or the value of COLUMNS; None if lines may have any length."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def _headlines(named: Sequence[str], runs: Path) -> list[str]:
    lines = []
    for word in named:
        study = find_study_folder(word, runs)
        record = None if study is None else study.read()
        if study is not None and record is not None:
            lines.append(f"{study.path.name}: {record.question}")
            lines += rung_lines(record, study)
            if (one := record.registered) is not None:
                looks = f"looks after {listed(one.looks, 'and')} pairs, {len(record.points) // 2} begun"
                lines.append(f"registered: {one.candidate} against {one.baseline} in {one.metric}, {looks}")
            if record.skipped:
                points = format_items(len(record.skipped), "point")
                lines.append(f"{points} skipped. To see why, type titan-exp sweep {word} --dry-run")
            if record.others:
                lines.append(f"the last call, which did not ask for every run: {record.command}")
            if (holder := study.holder()) is not None:
                lines.append(f"{holder} is running it")
    return lines


def _lines(rows: Sequence[StatusRow], *, in_full: bool, width: int | None) -> list[str]:
    """One line per run with the columns that fit, then the other columns, and the reasons."""
    with_group = in_full or len({row.group for row in rows}) > 1
    cells = [_cells(row, with_group) for row in rows]
    names = [*COLUMNS, *dict.fromkeys(name for row in rows if row.groups is not None for name in row.groups.cells())]
    names += ["continued from", *sorted({metric for row in rows for metric in row.reported})]
    known = [name for name in names if name in FIXED or any(row.get(name, "-") != "-" for row in cells)]
    if all(row["id"] in row["run"] for row in cells):
        known.remove("id")
    widths = {name: max(len(name), *(cell_len(row.get(name, "-")) for row in cells)) for name in known}
    left = (width or sys.maxsize) - sum(widths[name] + GAP for name in FIXED) + GAP
    shown = set(FIXED)
    for name in sorted(known, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if name not in shown and widths[name] + GAP <= left + max(0, widths["run"] - LABEL):
            shown.add(name)
            left -= widths[name] + GAP
    widths["run"] = max(len("run"), min(widths["run"], widths["run"] + left))
    lines = [_line({name: name for name in shown}, [name for name in known if name in shown], widths)]
    lines += [_line(row, [name for name in known if name in shown], widths) for row in cells]
    if missing := [name for name in known if name not in shown]:
        lines += ["", *_wrapped(f"Not shown: {_some(missing)}. A wider terminal or --json has them.", width)]
    return lines + _reasons(cells, width)


def _line(row: Mapping[str, str], names: Sequence[str], widths: Mapping[str, int]) -> str:
    cells = []
    for name in names:
        text, size = row.get(name, "-"), widths[name]
        if cell_len(text) > size:
            text = f"{text[: (size - 1) // 2]}…{text[len(text) - size // 2 :]}"
        space = " " * (size - cell_len(text))
        cells.append(text + space if name in LEFT else space + text)
    return (" " * GAP).join(cells).rstrip()


def _reasons(cells: Sequence[Mapping[str, str]], width: int | None) -> list[str]:
    runs: dict[tuple[str, str], list[str]] = {}
    for row in cells:
        if row["reason"] != "-":
            runs.setdefault((row["state"], row["reason"]), []).append(row["run"])
    lines = []
    for (state, reason), names in runs.items():
        lines += ["", *_wrapped(f"{state}: {_some(names)}", width), *_wrapped(reason, width, indent="  ")]
    return lines


def _some(names: Sequence[str]) -> str:
    """Names in a sentence: all of them, or the first ones and the number of others."""
    whole = len(names) <= NAMED + 1
    return ", ".join(names) if whole else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"


def _wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    if width is None:
        return [indent + text]
    wrapper = textwrap.TextWrapper(max(width, 20), indent, indent, break_on_hyphens=False, break_long_words=False)
    return wrapper.wrap(text)


def _cells(row: StatusRow, with_group: bool) -> dict[str, str]:
    label = f"{row.group}/{row.label}" if with_group and "/" not in row.label else row.label
    speed, predicted, peak = row.tokens_per_second, row.tokens_per_second_predicted, row.memory_predicted
    return {
        "run": label + (" (removed)" if row.removed else "" if row.asked else " (not in the last call)"),
        "id": row.run_id,
        "rung": "-" if row.rung is None else str(row.rung),
        "validation loss": "-" if row.rung is None else _number(row.validation_loss, ".4f"),
        "state": row.shown,
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
    hours = sum(row.gpu_hours or 0.0 for row in rows)
    so_far = f"; {hours:,.2f} GPU-hours so far" if hours else ""
    return f"{format_items(len(rows), 'run')}: {count_states([row.shown for row in rows])}{so_far}"


def _watch(named: Sequence[str], runs: Path) -> None:
    try:
        with Live(console=Terminal(), auto_refresh=False, screen=False) as live:
            while True:
                rows = status_rows(find_runs(named, runs))
                lines = _lines(rows, in_full=not named, width=_width()) if rows else []
                live.update(Text("\n".join([*lines, _count(rows)])), refresh=True)
                busy = any(study.holder() for word in named if (study := find_study_folder(word, runs)) is not None)
                if not busy and not any(row.state in ("queued", "running", "unknown") for row in rows):
                    return
                time.sleep(WATCH_EVERY)
    except KeyboardInterrupt:
        return


def _number(value: Value, form: str) -> str:
    return "-" if value is None else format(value, form)
