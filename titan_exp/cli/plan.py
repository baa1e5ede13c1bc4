"""The verb `titan-exp plan [overrides]`: what a run will take, before anything is launched."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.did_you_mean import listed, nearest
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment

if TYPE_CHECKING:
    from titan_exp.plan.cuda.devices import Device

HELP = """\
titan-exp plan [--device NAME] [--ranks LIST] [--html FILE] [--full] [--json] [key=value ...]
titan-exp plan search ...   all layouts of a cluster, the fastest that fit first; see titan-exp plan search --help
  for example: titan-exp plan model=llama3_8b cluster=slurm_h100 parallelism.dp_shard=64 compile=none \\
      training.global_batch_size=64 training.seq_len=8192 training.mixed_precision=bf16

  Runs the trainer's own build and two of its steps on tensors without data, for every pipeline rank, and prints the
  peak of memory and what it is made of, operations, messages, and an estimate of the step's time. Overrides are those
  of train. Needs no GPU, and no machine of the cluster. Of large runs a few layers and micro-batches are traced and put
  together, which tells the same.

  --device NAME  what it runs on: a100, h100, h200, b200, mi300x; without, cluster.gpu_type
  --ranks LIST   pipeline ranks to look at, as in --ranks 0,15; without, all
  --html FILE    also write a page to look at: which rank holds what, the pipeline's and the memory's timeline
  --full         trace every layer and micro-batch of every rank, which takes minutes for a large run
  --json         the same for programs, in bytes and seconds

titan-exp plan calibrate [STUDY|RUN ...]   fit what a device reaches to finished runs; --help says more"""

VERBS = ("search", "calibrate")
"""What may come first in place of overrides."""


@dataclass(frozen=True)
class Options:
    """What is typed besides overrides."""

    device: str | None = None
    """What it runs on."""
    ranks: tuple[int, ...] | None = None
    """Pipeline ranks to look at; None is all."""
    html: str | None = None
    """File of the page to look at."""
    full: bool = False
    """Trace every layer and micro-batch."""
    json: bool = False
    """Print JSON."""
    help: bool = False
    """Print what there is."""


def options_among(words: Sequence[str]) -> tuple[Options, list[str]]:
    """What of the words is for this verb, and the rest.

    Raises:
        UserError: an option has no value.
    """
    rest, given = list(words), dict[str, Any]()
    for name, example in (("device", "h100"), ("ranks", "0,15"), ("html", "plan.html")):
        if f"--{name}" in rest:
            place = rest.index(f"--{name}")
            if place + 1 == len(rest):
                raise UserError(f"--{name} takes a value, as in --{name} {example}")
            given[name] = rest[place + 1]
            del rest[place : place + 2]
    if "ranks" in given:
        if not all(number.isdecimal() for number in given["ranks"].split(",")):
            raise UserError(f"--ranks {given['ranks']}: it takes numbers with commas between, as in --ranks 0,15")
        given["ranks"] = tuple(map(int, given["ranks"].split(",")))
    for name in ("json", "full"):
        if f"--{name}" in rest:
            rest.remove(f"--{name}")
            given[name] = True
    if {"--help", "-h"} & set(rest):
        given["help"] = True
    return Options(**given), rest


def require_no_verb(words: Sequence[str]) -> None:
    """None of the overrides is a verb of `plan`, or meant to be one.

    Raises:
        UserError: one is.
    """
    for word in words[:1]:
        meant = nearest(word, VERBS, 1) if word.isalpha() else []
        if meant:
            raise UserError(f"titan-exp plan {word}: did you mean titan-exp plan {meant[0]}? An override is key=value.")


def plan_command(cfg: Any, options: Options) -> int:
    """Predict a composed run and print it; returns the exit code.

    Raises:
        UserError: the run cannot be started, or not planned.
    """
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
            f"--ranks {max(options.ranks)}: there is no such pipeline rank; parallelism.pp={experiment.parallelism.pp}"
        )

    from titan_exp.plan.plan_table import as_json, print_plan
    from titan_exp.plan.predict import predict

    visualization = None
    if options.html is not None:
        from titan_exp.plan.visualize.draw import Visualization

        visualization = Visualization(options.html)
    plan = predict(
        experiment, device, options.ranks, on_rank=visualization and visualization.add_rank, full=options.full
    )
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print_plan(plan)
    if visualization is not None:
        visualization.write(plan)
        print(f"page: {visualization.path}", file=sys.stderr if options.json else sys.stdout)
    return 0


def device_for(experiment: Experiment, asked: str | None) -> "Device | None":
    """What a run would run on: the device that is asked for, else the cluster's; None is a CPU.

    Raises:
        UserError: it is not known.
    """
    from titan_exp.config.machine.devices import device_type
    from titan_exp.plan.cuda.devices import DEVICES, device_named
    from titan_exp.plan.device_memory import device_memory_of, refine_gpu

    runs = Path(experiment.paths.runs).expanduser()
    if asked is not None:
        return refine_gpu(device_named(asked), experiment, runs / ".cache")
    target = device_memory_of(experiment, runs)
    if target.device is None and device_type(experiment.cluster) == "cuda":
        raise UserError(
            f"plan: which GPU? cluster.gpu_type={experiment.cluster.gpu_type or 'null'} is none that is known here. "
            f"--device takes {listed(DEVICES)}."
        )
    return target.device
