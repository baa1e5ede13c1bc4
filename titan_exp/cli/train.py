"""Compose a run, check it, launch it; with -m, every combination of values."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.cli.shell.hydra_command import run_sweep_with_hydra

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    from titan_exp.launch.sweep.sweep_args import train_args

    return run_sweep_with_hydra(train_args(argv), _launch)


def _launch(cfg: Any, overrides: Sequence[str]) -> int:
    from titan_exp.config.command_line.help import remarks
    from titan_exp.config.paths.checkpoint_files import saved_state
    from titan_exp.launch.executor import executor_for
    from titan_exp.launch.memory_gate import gate_run
    from titan_exp.launch.provenance.changes import report_stale
    from titan_exp.launch.run_console import RunConsole
    from titan_exp.launch.run_id import rate_after_decay, related_runs
    from titan_exp.launch.run_plan import plan_run
    from titan_exp.launch.state.run_status import print_dry_run
    from titan_exp.launch.sweep.sweep_args import current_sweep_options
    from titan_exp.rules.composed import read_experiment

    experiment = read_experiment(cfg, lambda _: True)
    plan = plan_run(experiment, overrides)
    said = (*remarks(overrides, plan.experiment), *plan.compilation, *rate_after_decay(plan.experiment))
    for sentence in said:
        print(sentence)
    if experiment.data.preview is not None:
        from titan_exp.data.preview import preview

        for line in preview(experiment.data, experiment.training, experiment.experiment.seed, experiment.data.preview):
            print(line)
        return 0
    if saved_state(str(plan.folder.path)) is None and plan.experiment.checkpoint.continue_from is None:
        for related in related_runs(plan.experiment)[:1]:
            print(
                f"{related.name} is this experiment in another layout or with other steps, saved at step "
                f"{related.step}. To go on from there, add checkpoint.continue_from={related.name}"
            )
    report_stale([plan], print)
    executor = executor_for(experiment.cluster.kind)
    gated = gate_run(plan, RunConsole().echo)
    if current_sweep_options().dry_run:
        print_dry_run(executor, gated)
        return 0
    code = executor.launch(gated)
    # A run fetched from checkpoint.remote, or of no steps, has no metrics.
    if code == 0 and executor.waits and experiment.training.steps and plan.folder.metrics.exists():
        _report_result(plan.experiment, plan.folder.path)
    return code


def _report_result(experiment: "Experiment", folder: Path) -> None:
    """Draw the curves of a run that is done, and print the reports of extensions."""
    from titan_exp.compare.output.plots import draw_run
    from titan_exp.config.extension import load, provided

    try:
        for line in draw_run(folder):
            print(line)
        for report in provided("reports").values():
            for line in load(report)(experiment, folder):
                print(line)
    except OSError as error:  # a run of another user, or a full disk
        print(f"{error.filename or folder}: cannot be written ({error.strerror or error})", file=sys.stderr)
