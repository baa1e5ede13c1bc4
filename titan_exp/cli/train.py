"""Compose a run, check it, launch it; with -m, every combination of values."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.cli.hydra_command import run_sweep_with_hydra
from titan_exp.config.command_line.output import answer
from titan_exp.launch.sweep.sweep_args import current_sweep_options, train_args

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment
    from titan_exp.launch.executor import Executor, RunPlan


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    return run_sweep_with_hydra(train_args(argv), _launch)


def _launch(cfg: Any, overrides: Sequence[str]) -> int:
    from titan_exp.config.checkpoint_files import saved_state
    from titan_exp.config.command_line.help import remarks
    from titan_exp.launch import memory_gate
    from titan_exp.launch.executor import executor_for
    from titan_exp.launch.provenance import report_stale
    from titan_exp.launch.run_console import RunConsole
    from titan_exp.launch.run_plan import laptop_rate, plan_run, rate_after_decay, related_runs
    from titan_exp.rules.composed import read_experiment

    experiment = read_experiment(cfg, lambda _: True)
    plan = plan_run(experiment, overrides)
    said = (*remarks(overrides, plan.experiment), *plan.compilation, *rate_after_decay(plan.experiment))
    for sentence in (*said, *laptop_rate(overrides, plan.experiment)):
        print(sentence)
    if experiment.data.preview is not None:
        return _preview(experiment, experiment.data.preview)
    if saved_state(str(plan.folder.path)) is None and plan.experiment.checkpoint.continue_from is None:
        for related in related_runs(plan.experiment)[:1]:
            other = f"{related.name} is this experiment in another layout or with other steps"
            remedy = f"To go on from there, add checkpoint.continue_from={related.name}"
            print(f"{other}, saved at step {related.step}. {remedy}")
    report_stale([plan], print)
    executor, options = executor_for(experiment.cluster.kind), current_sweep_options()
    if not options.dry_run and not plan.is_done:
        executor.require([plan])
    gated = memory_gate.gate_run(plan, RunConsole().echo)
    for line in () if plan.is_done else memory_gate.request_lines([gated]):
        print(line)
    if options.dry_run:
        return _show_dry_run(gated, executor, as_json=options.json)
    submission = executor.launch(gated)
    code = submission.exit_code
    if options.json:
        answer({"exit_code": code, "runs": memory_gate.outcome_records([submission], [gated.name])})
    # A run fetched from checkpoint.remote, or without steps, has no metrics.
    if code == 0 and executor.waits and experiment.training.steps and plan.folder.metrics.exists():
        _report_result(plan.experiment, plan.folder.path)
    return code


def _show_dry_run(plan: "RunPlan", executor: "Executor", *, as_json: bool) -> int:
    """Print what submitting a run would do, and its job script; writes nothing."""
    from titan_exp.launch.memory_gate import planned_records, predicted, script_records
    from titan_exp.launch.run_status import run_status

    path, last = plan.folder.path, plan.experiment.training.last_step
    for line in predicted(plan):
        print(line)
    status = run_status(plan.folder) if path.exists() else None
    if status is None or status.state == "new":
        print(f"would start {path}, {plan.size}, to step {last}")
    elif status.state == "done" or status.active:
        print(f"would start nothing: {path} is {status.shown}, after step {status.step}")
    else:
        print(f"would continue {path}, {status.shown} after step {status.step}, {plan.size}")
    if (script := executor.script(plan)) is not None:
        print(f"\n{script}", end="")
    if as_json:
        records, scripts = planned_records([plan], [plan.name]), script_records([plan])
        answer({"dry_run": True, "exit_code": 0, "runs": records, "scripts": scripts})
    return 0


def _preview(experiment: "Experiment", step: int) -> int:
    from titan_exp.data.train_loader import preview

    lines = list[str]()
    for line in preview(experiment.data, experiment.training, experiment.experiment.seed, step):
        print(line)
        lines.append(line)
    if current_sweep_options().json:
        answer({"exit_code": 0, "runs": [], "preview": lines})
    return 0


def _report_result(experiment: "Experiment", folder: Path) -> None:
    """Draw the curves of a run that is done, and print the reports of extensions."""
    from titan_exp.compare.output.plots import draw_run
    from titan_exp.config.extension import load, loaded, provided

    try:
        for line in draw_run(folder):
            print(line)
        for report in (*map(load, provided("reports").values()), *loaded("unfinished")):
            for line in report(experiment, folder):
                print(line)
    except OSError as error:  # a run of another user, or a full disk
        print(f"Cannot write {error.filename or folder} ({error.strerror or error})", file=sys.stderr)
