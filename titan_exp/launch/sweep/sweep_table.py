"""Sweep tables: the plan before the start, the outcomes after the end."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import indent

from rich.console import Console
from rich.table import Table

from titan_exp.config.command_line.help import forgotten_tokenizer
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.config.machine.devices import device_type
from titan_exp.launch.executor import Submission, executor_for, typed_path
from titan_exp.launch.run_console import summarize
from titan_exp.launch.run_id import rate_after_decay
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.state.run_status import count_states, run_statuses
from titan_exp.launch.sweep.shipped_study import StudySweep
from titan_exp.launch.sweep.sweep_plan import SkippedPoint, SweepPlan, labels_by_reason
from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.tracking.number_format import GIB
from titan_exp.tracking.sinks.sink import Value
from titan_exp.trainer.profiling.slow_options import repeated_reading


def hours(text: str) -> float:
    """Parse a time limit (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to hours."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    in_hours = parts if dash or len(parts) == 3 else [0, *parts]
    return int(days or 0) * 24 + sum(part / 60**power for power, part in enumerate(in_hours))


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Print a table with its first `left` columns left-aligned and the others right-aligned."""
    table = Table(box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)


def plain_console() -> Console:
    """Console with the terminal's width, or 240 columns if the output is not a terminal."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=240)


def show_plan(sweep_plan: SweepPlan, study: StudySweep | None, upcoming: Sequence[str] = ()) -> None:
    """Print every point with its resources, prediction and current state, and sentences about later rounds."""
    if study is not None:
        print(f"{study.folder.path.name}: {study.study.question}\n")
    now = run_statuses([entry.plan.folder for entry in sweep_plan.planned])
    labels = {entry.plan.folder.path: entry.point.label for entry in sweep_plan.planned}
    gpu_hours = {entry.plan.folder.path: _gpu_hours(entry.plan) for entry in sweep_plan.planned}
    headings = ["point", "run", "experiment", "state", "processes", "nodes"]
    predicted = {entry.plan.folder.path: _predicted(entry.memory_check) for entry in sweep_plan.planned}
    shown = [name for name in _PREDICTED if any(cells[name] != "-" for cells in predicted.values())]
    with_hours = any(value is not None for value in gpu_hours.values())
    rows = []
    for entry in (*sweep_plan.planned, *sweep_plan.duplicates):
        path = entry.plan.folder.path
        same = labels[path] != entry.point.label
        state = f"same run as {labels[path]}" if same else now[path].shown
        row = [entry.point.label, entry.plan.run_id, entry.plan.experiment_id, state]
        row += [str(entry.plan.layout.world_size), str(entry.plan.layout.nodes)]
        row += [predicted[path][name] for name in shown]
        value = gpu_hours[path]
        rows.append([*row, "-" if value is None else f"{value:,.1f}"] if with_hours else row)
    headings += shown
    plain_table([*headings, "GPU-hours asked"] if with_hours else headings, rows, left=4)
    if shown:
        print(PREDICTED)
    repeated = (repeated_reading(entry.plan.experiment.data, entry.plan.layout) for entry in sweep_plan.planned)
    for line in dict.fromkeys(chain.from_iterable(repeated)):
        print(f"slower than without: {line}")
    for line in remarks_on(entry.plan for entry in sweep_plan.planned):
        print(line)
    _show_skipped(sweep_plan.skipped)
    waiting = [
        entry.plan.folder.path for entry in sweep_plan.planned if now[entry.plan.folder.path].state not in _LEFT_ALONE
    ]
    states = [now[entry.plan.folder.path].state for entry in sweep_plan.planned]
    counts = [f"{states.count(state)} {state}" for state in _LEFT_ALONE if state in states]
    counts += [f"{len(sweep_plan.skipped)} skipped"] if sweep_plan.skipped else []
    total = sum(gpu_hours[path] or 0.0 for path in waiting)
    hours_asked = f", {total:,.1f} GPU-hours asked" if with_hours and waiting else ""
    print(f"\n{len(waiting)} to start{hours_asked}{''.join(f', {text}' for text in counts)}.")
    for line in upcoming:
        print(line)
    if study is not None:
        study.report_changes(sweep_plan, print)


def remarks_on(plans: Iterable[RunPlan]) -> list[str]:
    """Sentences about runs, each once: a forgotten tokenizer, compilation, and a learning rate that rises again."""
    said = (
        (
            *forgotten_tokenizer(plan.overrides, plan.experiment),
            *plan.compilation,
            *rate_after_decay(plan.experiment),
        )
        for plan in plans
    )
    return list(dict.fromkeys(chain.from_iterable(said)))


def show_outcomes(
    sweep_plan: SweepPlan,
    found: Mapping[Path, Submission],
    study: StudySweep | None,
    upcoming: Sequence[str] = (),
) -> None:
    """Print the outcome of every run, and the next commands; `upcoming` are sentences about later rounds."""
    rows, jobs = [], []
    for entry in sweep_plan.planned:
        submission = found.get(entry.plan.folder.path)
        loss = validation = None
        state = "not started" if submission is None else submission.shown
        if submission is not None and state != "not started" and entry.plan.folder.path.exists():
            summary = summarize(entry.plan.folder)
            loss, validation = summary.loss, summary.validation_loss
        rows.append([entry.point.label, entry.plan.run_id, state, _number(loss), _number(validation)])
        jobs.append("-" if submission is None or submission.job_id is None else submission.job_id)
    print()
    if any(job != "-" for job in jobs):
        with_jobs = [[*row[:3], job, *row[3:]] for row, job in zip(rows, jobs, strict=True)]
        plain_table(["point", "run", "state", "job", "loss", "validation loss"], with_jobs, left=4)
    else:
        plain_table(["point", "run", "state", "loss", "validation loss"], rows, left=3)
    if sweep_plan.duplicates:
        print(f"{len(sweep_plan.duplicates)} more point(s) are the same run as one of these.")
    _show_skipped(sweep_plan.skipped)
    refusals: dict[str, list[str]] = {}
    for entry in sweep_plan.planned:
        submission = found.get(entry.plan.folder.path)
        waits = executor_for(entry.plan.experiment.cluster.kind).waits  # those have already printed it
        if submission and submission.outcome == "refused" and not waits:
            refusals.setdefault(submission.reason or "", []).append(f"[{entry.point.label}]")
    for reason, labels in refusals.items():
        print("\n".join([*labels, indent(reason, "  ")]), file=sys.stderr)
    states = [row[2] for row in rows]
    print(count_states(states))
    for line in upcoming:
        print(line)
    if upcoming and study is not None and not {"failed", "refused", "not started", *STOPPED} & set(states):
        print(f"When these runs are done, the same command continues: titan-exp sweep {study.study.name}")
    for line in _next(states, sweep_plan, study):
        print(line)


def _next(states: Sequence[str], sweep_plan: SweepPlan, study: StudySweep | None) -> list[str]:
    """Suggested next commands."""
    name = typed_path(sweep_plan.planned[0].plan.folder.path.parent) if study is None else study.arguments
    if any(state in ("submitted", "queued") for state in states):
        first = typed_path(sweep_plan.planned[0].plan.folder.path)
        return [f"  titan-exp status {name}", f"  titan-exp logs -f {first}", f"  titan-exp cancel {name}"]
    if study is not None and ("failed" in states or "refused" in states):
        return [f"Why: titan-exp logs {name}. The same command starts again what is missing or failed."]
    if study is not None and {"not started", *STOPPED} & set(states):
        return ["The same command continues where this one stopped."]
    return []


STOPPED = ("stopped", "preempted")
"""Words for runs that the same command continues."""
_PREDICTED = ("GiB", "s/step", "tokens/s")
PREDICTED = (
    "GiB is the predicted peak of a process' memory, < an upper bound that decides without planning "
    "(plan.predict=always plans); s/step and tokens/s are predicted where the rates of the device are known."
)


def _predicted(memory_check: MemoryCheck | None) -> dict[str, str]:
    """Predicted memory and speed of a point, by column."""
    cells: dict[str, str] = dict.fromkeys(_PREDICTED, "-")
    if memory_check is None or memory_check.device_memory is None:
        return cells
    if memory_check.prediction is None:
        return cells if memory_check.bound is None else cells | {"GiB": f"< {memory_check.bound / GIB:.1f}"}
    cells["GiB"] = f"{memory_check.process_bytes(memory_check.prediction.largest) / GIB:.2f}"
    if memory_check.prediction.step_seconds is not None:
        experiment, seconds = memory_check.experiment, memory_check.prediction.step_seconds
        tokens = experiment.training.global_batch_size * experiment.training.seq_len
        cells |= {"s/step": f"{seconds:.3g}", "tokens/s": f"{tokens / seconds:,.0f}"}
    return cells


_LEFT_ALONE = ("done", "queued", "running")
"""States of runs that are not restarted."""


def _show_skipped(skipped: Sequence[SkippedPoint]) -> None:
    if skipped:
        print(f"\n{len(skipped)} point(s) are skipped:")
    for reason, labels in labels_by_reason(skipped).items():
        print(indent("\n".join(labels), "  "))
        print(indent(reason, "    "))


def _gpu_hours(plan: RunPlan) -> float | None:
    """Requested GPU-hours: time limit × GPUs; None without a limit or on CPU."""
    cluster = plan.experiment.cluster
    if cluster.time_limit is None or device_type(cluster) != "cuda":
        return None
    return hours(cluster.time_limit) * plan.layout.world_size


def _number(value: Value) -> str:
    return "-" if value is None else f"{value:.4f}"
