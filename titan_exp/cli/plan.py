"""Predict memory and speed of a run before it is launched, or rank all layouts for a cluster (plan search)."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.cli.plan_commands.device import device_for
from titan_exp.cli.shell.hydra_command import run_with_hydra
from titan_exp.cli.shell.output_file import OutputFile
from titan_exp.config.command_line.options import HELP, SWITCHES, VALUED, options_help, take_options
from titan_exp.config.command_line.verb_options import PlanOptions
from titan_exp.config.errors.user_error import UserError, nearest
from titan_exp.config.machine.devices import device_type

if TYPE_CHECKING:
    from titan_exp.plan.gate.gate import MemoryCheck

USAGE = """\
titan-exp plan [--device NAME] [--ranks LIST] [--html FILE] [--trace FILE] [--kernels] [--full] [--json] [--trust]
             [key=value ...]
titan-exp plan search ...   rank all layouts of a cluster by speed; --help there
  for example: titan-exp plan model=llama3_8b cluster=slurm_h100 parallelism.dp_shard=64 compile=none \\
      training.global_batch_size=64 training.seq_len=8192 training.mixed_precision=bf16

  Traces the trainer's own build and two of its steps on fake tensors, for every pipeline rank, and prints the peak
  memory with its breakdown, FLOPs, communication and an estimate of the step time. Takes the overrides of train. Needs
  neither a GPU nor the cluster. Large models are extrapolated from a few traced layers and micro-batches. A run that
  does not fit is answered with changes that would, and exit code 3."""

DOES_NOT_FIT = 3
"""Exit code of a run that does not fit."""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if argv[:1] == ["search"]:
        from titan_exp.cli.plan_commands.search import run_search

        return run_search(argv[1:])
    if argv[:1] == ["calibrate"]:
        raise UserError(
            "titan-exp plan calibrate: there is no such verb any more, since titan-exp doctor measures the rates that "
            "a plan uses. Run titan-exp doctor on a machine with such devices, with the same paths.runs."
        )
    if set(argv) & set(HELP):
        print(options_help(USAGE, PlanOptions), end="")
        return 0
    options, overrides = take_options(PlanOptions, argv, others=(*SWITCHES, *VALUED))
    require_no_verb(overrides)
    command = shlex.join(["titan-exp", "plan", *argv])
    return run_with_hydra(overrides, lambda cfg, typed: plan_command(cfg, typed, options, command), trust=options.trust)


def require_no_verb(overrides: Sequence[str]) -> None:
    """Raise UserError if the first override is a misspelling of the sub-verb of `plan`."""
    for word in overrides[:1]:
        if word.isalpha() and nearest(word, ["search"], 1):
            raise UserError(f"titan-exp plan {word}: did you mean titan-exp plan search? An override is key=value.")


def plan_command(cfg: Any, typed: Sequence[str], options: PlanOptions, command: str) -> int:
    """Predict a composed run and print the plan; returns the exit code. Raises UserError if the run breaks a rule or
    cannot be predicted. The page shows the `command`."""
    from titan_exp.config.command_line.remarks import remarks
    from titan_exp.config.layout.resolved_layout import compilation, resolve_layout
    from titan_exp.config.machine.devices import offered_devices
    from titan_exp.plan.planner_processes import start_forkserver
    from titan_exp.plan.supported import check_supported
    from titan_exp.rules import check
    from titan_exp.rules.composed import read_experiment

    composed = read_experiment(cfg)
    experiment = resolve_layout(check(composed), offered_devices(composed.cluster))
    check_supported(experiment)
    if experiment.parallelism.pp > 1:
        start_forkserver()
    messages = sys.stderr if options.json else sys.stdout
    for sentence in (*remarks(typed, experiment), *compilation(composed)):
        print(sentence, file=messages)
    memory = device_for(experiment, options.device)
    ranks = options.pipeline_ranks
    if ranks is not None and max(ranks) >= experiment.parallelism.pp:
        raise UserError(
            f"--ranks {max(ranks)}: no such pipeline rank, since parallelism.pp={experiment.parallelism.pp}. "
            f"Use 0 to {experiment.parallelism.pp - 1}."
        )

    from titan_exp.plan.gate.check_user_code import check_user_code, failing_user_code
    from titan_exp.plan.gate.gate import MemoryCheck
    from titan_exp.plan.gate.predictions import FAILED
    from titan_exp.plan.predict import predict
    from titan_exp.plan.tables import plan_to_json, print_plan

    page = None if options.html is None else OutputFile("--html", options.html, "plan.html")
    trace = None if options.trace is None else OutputFile("--trace", options.trace, "plan.json")
    with failing_user_code(experiment, FAILED):
        check_user_code(experiment)
        plan = predict(experiment, memory.device, ranks, full=options.full, worst_load=True)
    memory_check = MemoryCheck(experiment, memory, prediction=plan.prediction)
    if options.json:
        print(json.dumps(plan_to_json(plan), indent=2))
    else:
        print_plan(plan, kernels=options.kernels)
    if page is not None:
        from titan_exp.plan.visualize.draw import html_page

        page.write(html_page(plan, memory_check, command))
        print(f"page: {page.path}", file=messages)
    if trace is not None:
        from titan_exp.plan.visualize.schedule import trace_json

        trace.write(trace_json(plan))
        print(f"trace: {trace.path} (open it at ui.perfetto.dev)", file=messages)
    return _verdict(memory_check, options)


def _verdict(memory_check: "MemoryCheck", options: PlanOptions) -> int:
    """Print whether a run fits, or changes with which it would; returns the exit code."""
    from titan_exp.plan.gate.gate import explain_fit
    from titan_exp.plan.gate.suggestions import explain_changes

    if memory_check.fits is not False:
        # On a GPU, the table says so.
        if memory_check.fits and device_type(memory_check.experiment.cluster) == "cpu" and not options.json:
            print(explain_fit(memory_check))
        return 0
    if not options.json:
        runs = Path(memory_check.experiment.paths.runs).expanduser()
        print(explain_changes(memory_check, runs, print))
    return DOES_NOT_FIT
