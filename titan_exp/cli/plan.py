"""Predict memory and speed of a run before it is launched, or rank all layouts for a cluster (plan search)."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.cli.hydra_command import run_with_hydra
from titan_exp.cli.plan_commands.options import device_for, take_options
from titan_exp.config.errors.did_you_mean import nearest
from titan_exp.config.errors.user_error import UserError

HELP = """\
titan-exp plan [--device NAME] [--ranks LIST] [--html FILE] [--full] [--json] [key=value ...]
titan-exp plan search ...   rank all layouts of a cluster by speed; see titan-exp plan search --help
  for example: titan-exp plan model=llama3_8b cluster=slurm_h100 parallelism.dp_shard=64 compile=none \\
      training.global_batch_size=64 training.seq_len=8192 training.mixed_precision=bf16

  Traces the trainer's own build and two of its steps on fake tensors, for every pipeline rank, and prints the peak
  memory with its breakdown, FLOPs, communication and an estimate of the step time. Takes the overrides of train. Needs
  neither a GPU nor the cluster. Large models are extrapolated from a few traced layers and micro-batches.

  --device NAME  device: a100, h100, h200, b200, mi300x; default: cluster.gpu_type
  --ranks LIST   pipeline ranks to predict, as in --ranks 0,15; default: all
  --html FILE    also write a page: the shards of every rank, the pipeline schedule and memory over a step
  --full         trace every layer and micro-batch of every rank, which takes minutes for a large run
  --json         print JSON, in bytes and seconds

titan-exp plan calibrate [STUDY|RUN ...]   fit a device's constants to finished runs; see --help there"""

VERBS = ("search", "calibrate")
"""Sub-verbs of `titan-exp plan`."""


@dataclass(frozen=True)
class Options:
    """Options of `titan-exp plan`."""

    device: str | None = None
    """Key of the device table."""
    ranks: tuple[int, ...] | None = None
    """Pipeline ranks to predict; None is all."""
    html: str | None = None
    """Path of the HTML page."""
    full: bool = False
    """True to trace every layer and micro-batch."""
    json: bool = False
    """True to print JSON."""
    help: bool = False
    """True to print the help."""


def run(words: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if words[:1] == ["search"]:
        from titan_exp.cli.plan_commands.search import HELP as SEARCH_HELP
        from titan_exp.cli.plan_commands.search import search_command, search_options

        search, rest = search_options(words[1:])
        if search.help:
            print(SEARCH_HELP)
            return 0
        return run_with_hydra(rest, lambda cfg, typed: search_command(cfg, search, typed))
    if words[:1] == ["calibrate"]:
        from titan_exp.cli.plan_commands.calibrate import calibrate_command

        return calibrate_command(words[1:])
    options, others = options_among(words)
    if options.help:
        print(HELP)
        return 0
    require_no_verb(others)
    return run_with_hydra(others, lambda cfg, _: plan_command(cfg, options))


def options_among(words: Sequence[str]) -> tuple[Options, list[str]]:
    """Split command-line words into options and overrides. Raises UserError if an option lacks its value."""
    given, rest = take_options(words, {"device": "h100", "ranks": "0,15", "html": "plan.html"}, ("json", "full"))
    if "ranks" in given:
        if not all(number.isdecimal() for number in given["ranks"].split(",")):
            raise UserError(f"--ranks {given['ranks']}: must be numbers separated by commas, as in --ranks 0,15")
        given["ranks"] = tuple(map(int, given["ranks"].split(",")))
    return Options(**given), rest


def require_no_verb(words: Sequence[str]) -> None:
    """Raise UserError if the first override is a sub-verb of `plan`, or a misspelling of one."""
    for word in words[:1]:
        meant = nearest(word, VERBS, 1) if word.isalpha() else []
        if meant:
            raise UserError(f"titan-exp plan {word}: did you mean titan-exp plan {meant[0]}? An override is key=value.")


def plan_command(cfg: Any, options: Options) -> int:
    """Predict a composed run and print the plan; returns the exit code. Raises UserError if the run breaks a rule or
    cannot be predicted."""
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.config.machine.devices import offered_devices
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.supported import check_supported
    from titan_exp.rules import check

    experiment = to_experiment(cfg)
    experiment = resolve_layout(check(experiment), offered_devices(experiment.cluster))
    check_supported(experiment)
    device = device_for(experiment, options.device)
    if options.ranks is not None and max(options.ranks) >= experiment.parallelism.pp:
        raise UserError(
            f"--ranks {max(options.ranks)}: no such pipeline rank, since parallelism.pp={experiment.parallelism.pp}. "
            f"Use 0 to {experiment.parallelism.pp - 1}."
        )

    from titan_exp.plan.plan_table import plan_to_json, print_plan
    from titan_exp.plan.predict import predict

    visualization = None
    if options.html is not None:
        from titan_exp.plan.visualize.draw import Visualization

        visualization = Visualization(options.html)
    on_rank = None if visualization is None else visualization.add_rank
    plan = predict(experiment, device, options.ranks, on_rank, full=options.full)
    if options.json:
        print(json.dumps(plan_to_json(plan), indent=2))
    else:
        print_plan(plan)
    if visualization is not None:
        visualization.write(plan)
        print(f"page: {visualization.path}", file=sys.stderr if options.json else sys.stdout)
    return 0
