"""The verb `titan-exp plan search [options] [overrides]`: which layout to launch."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import device_type, offered_devices

if TYPE_CHECKING:
    from titan_exp.plan.cuda.devices import Device
    from titan_exp.plan.search.search import SearchResult

HELP = """\
titan-exp plan search [--gpus N] [--tokens N] [--global-batch-size N] [--limit K] [--device NAME] [--json] ...
  for example: titan-exp plan search model=llama3_405b cluster=slurm_h100 --gpus 512 --global-batch-size 512 \\
      training.seq_len=8192 training.mixed_precision=bf16 --tokens 15e12

  All layouts of a model on a cluster, the fastest that fit first: degrees, schedules, sizes of micro-batches, ways of
  recomputation. What is typed of these is kept, as in parallelism.tp=8; all else is as train takes it.

  --gpus N               how many; without, what the cluster group offers
  --tokens N             of the whole run, for GPU-hours and days; 15e12 is a number too
  --global-batch-size N  as training.global_batch_size=N
  --limit K              how many layouts to show; without, 10
  --device NAME          what it runs on: a100, h100, h200, b200, mi300x; without, cluster.gpu_type
  --json                 the same for programs, in bytes and seconds"""
_EXAMPLES = {"gpus": "512", "tokens": "15e12", "global-batch-size": "1024", "limit": "10", "device": "h100"}


@dataclass(frozen=True)
class SearchOptions:
    """What is typed besides overrides."""

    gpus: int | None = None
    """Number of GPUs."""
    tokens: int | None = None
    """Of the whole run."""
    limit: int = 10
    """Layouts to show."""
    device: str | None = None
    """What it runs on."""
    json: bool = False
    """Print JSON."""
    help: bool = False
    """Print what there is."""


def search_options(words: Sequence[str]) -> tuple[SearchOptions, list[str]]:
    """What of the words is for this verb, and the overrides.

    Raises:
        UserError: an option has no value, or none that it takes.
    """
    rest, given = list(words), dict[str, Any]()
    for name, example in _EXAMPLES.items():
        if f"--{name}" in rest:
            place = rest.index(f"--{name}")
            if place + 1 == len(rest):
                raise UserError(f"--{name} takes a value, as in --{name} {example}")
            value = rest[place + 1]
            del rest[place : place + 2]
            given[name.replace("-", "_")] = value if name == "device" else _count(name, value, example)
    if "global_batch_size" in given:
        rest.append(f"training.global_batch_size={given.pop('global_batch_size')}")
    if "--json" in rest:
        rest.remove("--json")
        given["json"] = True
    if {"--help", "-h"} & set(rest):
        given["help"] = True
    return SearchOptions(**given), rest


def search_command(cfg: Any, options: SearchOptions, typed: Sequence[str]) -> int:
    """Search the layouts of a composed run and print them; returns the exit code.

    Raises:
        UserError: nothing can be searched, or nothing fits.
    """
    from titan_exp.cli.plan import device_for
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.search.layouts import fixed_keys, search_space
    from titan_exp.plan.supported import check_supported, check_supported_on

    experiment = to_experiment(cfg)
    if device_type(experiment.cluster) == "cpu":
        raise UserError(
            "plan search: layouts are ranked by speed, and nothing is known of a CPU's. cluster=slurm_h100 is one of "
            "GPUs, and cluster=slurm with --device names any."
        )
    device = device_for(experiment, options.device)
    assert device is not None, "a GPU is known, or refused"
    gpus = options.gpus or offered_devices(experiment.cluster)
    # What no layout changes is told before any is looked at.
    check_supported(experiment)
    check_supported_on(experiment, device)
    if experiment.training.mixed_precision == "fp32":
        raise UserError(
            "plan search: layouts are ranked by speed, and of GPUs in fp32 none is known "
            "(training.mixed_precision=fp32). titan-exp plan says what a layout of it takes."
        )
    _require_shortcut(experiment)
    found = search_space(experiment, gpus, fixed_keys(typed))

    from titan_exp.plan.search.search import LayoutSearch
    from titan_exp.plan.search.search_table import print_search, search_json, steps_for

    with _progress() as tell:
        result = LayoutSearch(found, device, options.limit, tell).run()
    if not result.rows:
        raise UserError(_nothing_fits(result, device, gpus))
    more = {} if options.tokens is None else {"training.steps": steps_for(experiment, options.tokens)}
    if options.json:
        print(json.dumps(search_json(result, found, typed, more, options.tokens), indent=2))
    else:
        print_search(result, found, device, typed=typed, more=more, tokens=options.tokens)
    return 0


def _count(name: str, value: str, example: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if number < 1 or number != int(number):
        raise UserError(f"--{name} {value}: it takes a whole number from 1 on, as in --{name} {example}")
    return int(number)


def _require_shortcut(experiment: Experiment) -> None:
    """A search traces a few layers for all of them, which must be alike."""
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason

    parallelism = replace(experiment.parallelism, dp_replicate=1, dp_shard=1, tp=1, cp=1, pp=1, pp_microbatches=None)
    reason = unsupported_reason(resolve_layout(replace(experiment, parallelism=parallelism), 1))
    if reason is not None:
        raise UserError(
            f"plan search: layers must be alike to be traced once, and {reason}. titan-exp plan takes one layout of it."
        )


def _nothing_fits(result: "SearchResult", device: "Device", gpus: int) -> str:
    room = f"{device.memory_gb * 1e9 / 2**30:.1f} GiB"
    if result.smallest is None and result.unknown and not result.floor:
        return (
            f"plan search: no layout is known by a few of its layers, because {result.unknown[0][0]}. "
            "titan-exp plan takes one of them."
        )
    if result.smallest is None:
        return (
            f"plan search: nothing fits on {gpus} x {device.name}: what layers keep and gather "
            f"is more than its {room} in every layout. More GPUs (--gpus), or optimizer.state_precision=bf16."
        )
    smallest = result.smallest.experiment
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    degrees = " ".join(f"{name}={getattr(smallest.parallelism, name)}" for name in names)
    helps = ["more GPUs (--gpus)"]
    if smallest.training.loss_chunk_tokens is None:
        helps.append("training.loss_chunk_tokens=2048")
    if keeps_fp32_moments(smallest.optimizer):
        helps.append("optimizer.state_precision=bf16")
    return (
        f"plan search: nothing fits on {gpus} x {device.name} with {room}. The smallest of {result.looked_at} layouts "
        f"takes {result.smallest.peak_bytes / 2**30:.1f} GiB in {result.smallest.peak_where} ({degrees}, micro-batches "
        f"of {smallest.training.micro_batch_size}, activation_checkpoint.mode={smallest.activation_checkpoint.mode}). "
        f"What helps: {listed([*helps, 'a shorter training.seq_len'])}."
    )


class _progress:
    """A line on the terminal that says how it goes."""

    def __enter__(self) -> Any:
        from rich.console import Console

        self._status = Console(stderr=True).status("starting") if sys.stderr.isatty() else None
        if self._status is None:
            return lambda words: None
        self._status.start()
        return self._status.update

    def __exit__(self, *_: Any) -> None:
        if self._status is not None:
            self._status.stop()
