"""Sweep as tables and as JSON documents: the plan before the start, the outcomes after the end."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from titan_exp.config.command_line.help import forgotten_tokenizer
from titan_exp.config.command_line.terminal import Terminal
from titan_exp.launch import memory_gate
from titan_exp.launch.executor import Submission, executor_for, typed_path
from titan_exp.launch.memory_gate import gpu_hours
from titan_exp.launch.run_console import summarize
from titan_exp.launch.run_plan import RunPlan, laptop_rate, rate_after_decay
from titan_exp.launch.run_status import count_states, run_statuses
from titan_exp.launch.sweep.shipped_study import StudySweep
from titan_exp.launch.sweep.sweep_plan import SkippedPoint, SweepPlan, reasons_with_points
from titan_exp.plan.gate import MemoryCheck
from titan_exp.tracking.display import GIB, format_items
from titan_exp.tracking.run_folder.metrics_jsonl import Value
from titan_exp.tracking.run_folder.run_folder import has_diverged
from titan_exp.trainer.profiling.slow_options import repeated_reading

if TYPE_CHECKING:
    from titan_exp.launch.evidence import Standing  # imports NumPy


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


def show_plan(
    sweep_plan: SweepPlan,
    study: StudySweep | None,
    upcoming: Sequence[str] = (),
    costs: Sequence[Sequence[str]] = (),
) -> None:
    """Print the job scripts, every point with its resources, prediction and current state, what is asked in total, a
    table of costs with its headings, and sentences about later rounds."""
    now = run_statuses([entry.plan.folder for entry in sweep_plan.planned])
    labels = {entry.path: entry.point.label for entry in sweep_plan.planned}
    waiting = [entry.plan for entry in sweep_plan.planned if now[entry.path].state not in _LEFT_ALONE]
    for group, script in memory_gate.scripts(waiting):
        same = f"; {len(group) - 1} more ask for the same" if len(group) > 1 else ""
        print(f"Job script of {labels[group[0].folder.path]}{same}:\n\n{script}")
    if study is not None:
        print(f"{study.folder.path.name}: {study.study.question}\n")
    asked = {entry.path: gpu_hours(entry.plan) for entry in sweep_plan.planned}
    predicted = {entry.path: _predicted(entry.memory_check) for entry in sweep_plan.planned}
    shown = [name for name in _PREDICTED if any(cells[name] != "-" for cells in predicted.values())]
    with_hours = any(value is not None for value in asked.values())
    rows = []
    for entry in (*sweep_plan.planned, *sweep_plan.duplicates):
        path, plan, value = entry.path, entry.plan, asked[entry.path]
        same = labels[path] != entry.point.label
        state = f"same run as {labels[path]}" if same else now[path].shown
        row = [entry.point.label, plan.run_id, plan.experiment_id, state, str(plan.layout.world_size)]
        row += [str(plan.layout.nodes), *(predicted[path][name] for name in shown)]
        rows.append([*row, "-" if value is None else f"{value:,.1f}"] if with_hours else row)
    headings = ["point", "run", "experiment", "state", "processes", "nodes", *shown]
    plain_table([*headings, "GPU-hours asked"] if with_hours else headings, rows, left=4)
    if shown:
        print(PREDICTED)
    repeated = (repeated_reading(entry.plan.experiment.data, entry.plan.layout) for entry in sweep_plan.planned)
    for line in dict.fromkeys(chain.from_iterable(repeated)):
        print(f"slower than necessary: {line}")
    for line in remarks_on(entry.plan for entry in sweep_plan.planned):
        print(line)
    _show_skipped(sweep_plan)
    states = [now[entry.path].state for entry in sweep_plan.planned]
    counts = [f"{states.count(state)} {state}" for state in _LEFT_ALONE if state in states]
    counts += [f"{len(sweep_plan.skipped)} skipped"] if sweep_plan.skipped else []
    print(f"\n{', '.join([f'{len(waiting)} to start', *counts])}.")
    if costs:
        print()
        plain_table(costs[0], costs[1:], left=2)
    for line in (*memory_gate.request_lines(waiting), *upcoming):
        print(line)
    if study is not None:
        study.report_changes(sweep_plan, print)


def remarks_on(plans: Iterable[RunPlan]) -> list[str]:
    """Sentences about runs, each once: a forgotten tokenizer, compilation, and an unsuitable learning rate."""
    said = dict[str, None]()
    for typed, run, compilation in ((plan.overrides, plan.experiment, plan.compilation) for plan in plans):
        rates = (*rate_after_decay(run), *laptop_rate(typed, run))
        said |= dict.fromkeys((*forgotten_tokenizer(typed, run), *compilation, *rates))
    return list(said)


def show_outcomes(
    sweep_plan: SweepPlan,
    found: Mapping[Path, Submission],
    study: StudySweep | None,
    upcoming: Sequence[str] = (),
    answer: str = "",
) -> None:
    """Print the outcome of every run, and the study's answer, or sentences about later rounds and next commands."""
    rows, jobs = [], []
    words = {path: submission.shown for path, submission in found.items() if submission.outcome != "not started"}
    left = [entry.plan.folder for entry in sweep_plan.planned if entry.path not in words]
    words |= {path: status.shown for path, status in run_statuses(left).items()}
    for entry in sweep_plan.planned:
        submission, state = found.get(entry.path), words[entry.path]
        loss = validation = None
        if entry.path.exists():
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
        print(f"{format_items(len(sweep_plan.duplicates), 'further point')} repeat a run of these.")
    _show_skipped(sweep_plan)
    refusals = []
    for entry in sweep_plan.planned:
        submission = found.get(entry.path)
        waits = executor_for(entry.plan.experiment.cluster.kind).waits  # those executors have already printed it
        if submission and submission.outcome == "refused" and not waits:
            refusals.append(SkippedPoint(entry.point, submission.reason or ""))
    for line in reasons_with_points(refusals):
        print(line, file=sys.stderr)
    states = [row[2] for row in rows]
    print(count_states(states))
    if answer:
        print(f"\n{answer}")
        return
    for line in upcoming:
        print(line)
    if upcoming and study is not None and not {"failed", "refused", *CONTINUED} & set(states):
        print(f"When these runs are done, the same command continues: titan-exp sweep {study.study.name}")
    for line in _next(states, sweep_plan, study):
        print(line)


def _next(states: Sequence[str], sweep_plan: SweepPlan, study: StudySweep | None) -> list[str]:
    name = typed_path(sweep_plan.planned[0].plan.folder.path.parent) if study is None else study.arguments
    if any(state in ("submitted", "queued") for state in states):
        first = typed_path(sweep_plan.planned[0].plan.folder.path)
        return [f"  titan-exp status {name}", f"  titan-exp logs -f {first}", f"  titan-exp cancel {name}"]
    if study is not None and ("failed" in states or "refused" in states):
        found = (entry.plan.folder.read_state() for entry in sweep_plan.planned)
        diverged = sum(state is not None and has_diverged(state.state, state.reason) for state in found)
        again = "Give their points other values, or leave them out with `exclude`, since they would diverge again."
        return [
            f"Read titan-exp logs {name} to see why. The same command starts only what is missing or failed.",
            *([f"{format_items(diverged, 'run')} diverged. {again}"] if diverged else []),
        ]
    if "running" in states:
        return [
            f"Left alone, since an earlier command started them: {format_items(states.count('running'), 'run')}. Wait "
            f"for the end (titan-exp status {name}) and type the same command again, or stop: titan-exp cancel {name}"
        ]
    if study is not None and set(CONTINUED) & set(states):
        return ["The same command continues where this one stopped."]
    return [f"  titan-exp compare {name}"] if "done" in states else []


CONTINUED = ("new", "stopped", "preempted", "lost")  # words for runs that the same command would start or continue
_PREDICTED = ("GiB", "s/step", "tokens/s")
PREDICTED = (
    "GiB is the peak memory that we predict for a process. A number after < is an upper bound, which is enough to "
    "decide (plan.predict=always predicts the peak itself). s/step and tokens/s are predictions, for devices whose "
    "rates we know."
)


def _predicted(memory_check: MemoryCheck | None) -> dict[str, str]:
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


def _show_skipped(sweep_plan: SweepPlan) -> None:
    if sweep_plan.skipped:
        print("\n".join(["\nSkipped:", *reasons_with_points(sweep_plan.skipped)]))


def _number(value: Value) -> str:
    return "-" if value is None else f"{value:.4f}"


def plan_document(sweep_plan: SweepPlan, study: StudySweep | None, upcoming: Sequence[str]) -> dict[str, Any]:
    """Document of a dry run: every point with its state, resources and prediction, and job scripts."""
    plans = [entry.plan for entry in sweep_plan.planned]
    runs = memory_gate.planned_records(plans, [entry.point.label for entry in sweep_plan.planned])
    started = [plan for plan, run in zip(plans, runs, strict=True) if run["state"] not in _LEFT_ALONE]
    sizes = {"runs": runs, "scripts": memory_gate.script_records(started), "upcoming": upcoming}
    return {"dry_run": True, "exit_code": 0, **_study_values(sweep_plan, study), **sizes}


def outcome_document(
    sweep_plan: SweepPlan,
    found: Mapping[Path, Submission],
    study: StudySweep | None,
    *,
    upcoming: Sequence[str],
    conclusion: str,
    standing: "Standing | None",
    code: int,
) -> dict[str, Any]:
    """Document of a sweep that has ended or is submitted."""
    submissions = [found.get(entry.path) or Submission(entry.plan, "not started") for entry in sweep_plan.planned]
    return {
        "exit_code": code,
        **_study_values(sweep_plan, study),
        "conclusion": conclusion or None,
        "registered": standing and {"outcome": standing.outcome, "sentence": standing.sentence, **asdict(standing)},
        "upcoming": upcoming,
        "runs": memory_gate.outcome_records(submissions, [entry.point.label for entry in sweep_plan.planned]),
    }


def _study_values(sweep_plan: SweepPlan, study: StudySweep | None) -> dict[str, Any]:
    return {
        "name": sweep_plan.planned[0].plan.folder.path.parent.name,
        "question": None if study is None else study.study.question,
        "skipped": [{"label": entry.point.label, "reason": entry.reason} for entry in sweep_plan.skipped],
        "duplicates": [{"label": one.point.label, "run_id": one.plan.run_id} for one in sweep_plan.duplicates],
    }
