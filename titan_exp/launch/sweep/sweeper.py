"""Sweep: plans and checks every point, then submits the runs to their executors.

Finished runs are not repeated, so the same command continues an interrupted sweep.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.config.study.points import Point, values_of
from titan_exp.launch.executor import Submission, SubmitOptions, executor_for, worst_exit_code
from titan_exp.launch.provenance.changes import report_stale
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.sweep.options import SweepOptions
from titan_exp.launch.sweep.shipped_study import StudySweep
from titan_exp.launch.sweep.sweep_memory import predict_sweep_memory
from titan_exp.launch.sweep.sweep_plan import SweepPlan, plan_sweep
from titan_exp.launch.sweep.sweep_table import show_outcomes, show_plan


def points(overrides: Sequence[Override]) -> list[Point]:
    """Cartesian product of the swept values, the last key varying fastest. Raises UserError about an interval."""
    choices: dict[str, list[tuple[str, bool]]] = {}
    for override in overrides:
        choices[override.get_key_element()] = [(text, override.is_sweep_override()) for text in values_of(override)]
    found = []
    for combination in itertools.product(*choices.values()):
        swept = " ".join(text for text, is_swept in combination if is_swept)
        found.append(Point(tuple(text for text, _ in combination), swept or "(nothing swept)"))
    return found


def sweep(
    points: Sequence[Point],
    compose: Callable[[Point], Experiment],
    options: SweepOptions | None = None,
    *,
    study: StudySweep | None = None,
) -> int:
    """Run every point and print the outcomes, or print the plan; returns the exit code.

    A study record is written before any run starts. The exit code is 0 if all runs are done or submitted, 130 after
    Ctrl-C, 1 if any failed, 85 if any stopped. Raises one UserError, before any start, that lists all points that
    cannot run.
    """
    options = options or SweepOptions()
    where = "of the sweep" if study is None else f"of {study.study.path}"
    console, skip = RunConsole(), options.skip or study is not None
    sweep_plan = plan_sweep(points, compose, skip=skip, where=where)
    if study is not None:
        study.plan(sweep_plan)  # study errors are raised before slow predictions
    sweep_plan = predict_sweep_memory(sweep_plan, console.echo, skip=skip, where=where)
    if study is not None:
        study.plan(sweep_plan)
    if options.dry_run:
        show_plan(sweep_plan, study)
        return 0
    if study is not None:
        study.record(sweep_plan, console.echo)
        if options.prune:
            study.prune(console.echo, ask=not options.yes)
    found, code = _submit(sweep_plan, options, console, study)
    show_outcomes(sweep_plan, found, study)
    return code


def _submit(
    sweep_plan: SweepPlan, options: SweepOptions, console: RunConsole, study: StudySweep | None
) -> tuple[dict[Path, Submission], int]:
    """Submit all runs, executors that wait last; returns results by folder path, and the exit code."""
    report_stale([entry.plan for entry in sweep_plan.planned], console.echo)
    titles = {entry.plan.folder.path: entry.point.label for entry in sweep_plan.planned}
    by_kind: dict[str, list[RunPlan]] = {}
    for entry in sweep_plan.planned:
        by_kind.setdefault(entry.plan.experiment.cluster.kind, []).append(entry.plan)
    executors = [executor_for(kind) for kind in by_kind]
    submissions: list[Submission] = []
    for executor in sorted(executors, key=lambda executor: executor.waits):
        plans = by_kind[executor.kind]
        on_cpu = all(device_type(plan.experiment.cluster) == "cpu" for plan in plans)
        if executor.waits and options.jobs > 1 and not on_cpu:
            console.echo("On GPUs every run may use all of them, so runs go one after another.")
        submit_options = SubmitOptions(
            echo=console.echo,
            title=lambda plan: titles[plan.folder.path],
            jobs=options.jobs if on_cpu else 1,
            stop_requested=(lambda: False) if study is None else study.stop_requested,
        )
        with contextlib.nullcontext() if study is None or not executor.waits else study.lock():
            submissions += executor.submit(plans, submit_options)
    return {submission.plan.folder.path: submission for submission in submissions}, worst_exit_code(submissions)
