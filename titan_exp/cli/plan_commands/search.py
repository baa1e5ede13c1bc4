"""`titan-exp plan search`: rank the layouts of a cluster by predicted speed."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan_exp.cli.plan_commands.device import device_for
from titan_exp.cli.shell.hydra_command import run_with_hydra
from titan_exp.config.command_line.options import HELP, SWITCHES, VALUED, options_help, take_options
from titan_exp.config.command_line.verb_options import PlanSearchOptions
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.axes import DEGREES, ONE_DEVICE
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.machine.devices import device_type, offered_devices
from titan_exp.tracking.number_format import format_bytes

if TYPE_CHECKING:
    from titan_exp.config.groups.quantization import QuantizationConfig
    from titan_exp.plan.cuda.devices import Device
    from titan_exp.plan.search.search import SearchResult

USAGE = """\
titan-exp plan search [--gpus N] [--tokens N] [--global-batch-size N] [--limit K] [--seconds N] [--device NAME]
             [--recipes LIST] [--json] ...
  for example: titan-exp plan search model=llama3_405b cluster=slurm_h100 --gpus 512 --global-batch-size 512 \\
      training.seq_len=8192 training.mixed_precision=bf16 --tokens 15e12

  Ranks every layout that fits by predicted speed: parallel degrees, pipeline schedules, micro-batch sizes and
  activation checkpointing; near the fastest also chunks of the loss, resharding, stages per rank, the method of context
  parallelism and compile. Typed keys stay fixed, as in parallelism.tp=8; all other overrides are as in train."""


def run_search(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(options_help(USAGE, PlanSearchOptions), end="")
        return 0
    options, overrides = search_options(argv)
    task = lambda cfg, typed: search_command(cfg, options, typed)  # noqa: E731
    return run_with_hydra(overrides, task, trust=options.trust)


def search_options(argv: Sequence[str]) -> tuple[PlanSearchOptions, list[str]]:
    """Split the arguments into options of `plan search` and overrides. Raises UserError about an invalid option."""
    options, overrides = take_options(PlanSearchOptions, argv, others=(*SWITCHES, *VALUED), verb="plan search")
    if options.global_batch_size is not None:
        overrides.append(f"training.global_batch_size={options.global_batch_size}")
    return options, overrides


def search_command(cfg: Any, options: PlanSearchOptions, typed: Sequence[str]) -> int:
    """Search the layouts of a composed run and print them; returns the exit code. Raises UserError if the run cannot be
    searched, or no layout fits."""
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.planner_processes import start_forkserver
    from titan_exp.plan.search.layouts import SearchSpace, fixed_keys, train_command
    from titan_exp.plan.supported import check_supported, with_run_kernels

    experiment = to_experiment(cfg)
    if device_type(experiment.cluster) == "cpu":
        raise UserError(
            "plan search ranks layouts by speed and has no speed model for CPUs. Use cluster=slurm_h100, or "
            "cluster=slurm with --device h100."
        )
    parallelism = replace(experiment.parallelism, **ONE_DEVICE, pp_microbatches=None)
    on_one_device = resolve_layout(replace(experiment, parallelism=parallelism), 1)
    device = device_for(on_one_device, options.device).device
    assert device is not None, "a GPU is in the device table, or refused"
    gpus = options.gpus or offered_devices(experiment.cluster)
    # Refuse unsupported options that no layout changes before the search.
    check_supported(experiment, device)
    device = with_run_kernels(device, experiment)
    if experiment.training.mixed_precision == "fp32":
        raise UserError(
            "plan search ranks layouts by speed and has no speed model for fp32 on GPUs "
            "(training.mixed_precision=fp32). Use bf16; titan-exp plan predicts one fp32 layout."
        )
    _check_homogeneous(on_one_device)
    start_forkserver()
    space = SearchSpace(experiment, gpus, fixed_keys(typed), _recipes(options.recipe_names, typed))

    from titan_exp.plan.search.search import LayoutSearch
    from titan_exp.plan.tables import print_search, search_json, steps_for

    with _progress() as show:
        result = LayoutSearch(space, device, options.limit, show).run(options.seconds)
    if not result.rows:
        raise UserError(_explain_no_fit(result, device, gpus))
    tokens = None if options.tokens is None else int(options.tokens)
    more = {} if tokens is None else {"training.steps": steps_for(experiment.training, tokens)}
    commands = [train_command(row.candidate, typed, more) for row in result.rows]
    if options.json:
        print(json.dumps(search_json(result, commands, tokens), indent=2))
    else:
        print_search(result, device, commands, tokens)
    return 0


def _recipes(names: Sequence[str], typed: Sequence[str]) -> "dict[str, QuantizationConfig]":
    """Options of the group `quantization` by name, with typed keys of it. Raises UserError if there is none."""
    from titan_exp.config.extension import shipped_options
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.search.layouts import RECIPE

    known = [*shipped_options(RECIPE)]
    for name in names:
        if name not in known:
            raise UserError(f"--recipes {name}: unknown recipe. Use {listed(known)}.")
    keys = [word for word in typed if word.startswith(f"{RECIPE}.")]
    return {name: to_experiment(compose([f"{RECIPE}={name}", *keys])).quantization for name in names}


def _check_homogeneous(experiment: Experiment) -> None:
    """Check that layers are homogeneous, since a search extrapolates from a few."""
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason

    reason = unsupported_reason(experiment)
    if reason is not None:
        raise UserError(
            f"plan search extrapolates from a few layers, which does not work here: {reason}. "
            "titan-exp plan predicts one layout."
        )


def _explain_no_fit(result: "SearchResult", device: "Device", gpus: int) -> str:
    capacity = format_bytes(device.memory)
    if result.stopped:
        found = "no layout was planned" if not result.planned else f"none of {result.planned} planned layouts fits"
        return (
            f"plan search: {found} in {result.seconds:.0f} s, on {gpus} x {device.name} with {capacity}. "
            "Use more --seconds, or fix some keys, as in parallelism.tp=8."
        )
    if result.smallest is None and result.unknown and not result.floor:
        return (
            f"plan search: no layout can be extrapolated, because {result.unknown[0][0]}. "
            "titan-exp plan predicts one layout."
        )
    if result.smallest is None:
        return (
            f"plan search: nothing fits on {gpus} x {device.name}: parameters, gradients and activations alone need "
            f"more than its {capacity} in every layout. Use more GPUs (--gpus), or optimizer.state_precision=bf16."
        )
    smallest = result.smallest.candidate.experiment
    degrees = " ".join(f"{name}={getattr(smallest.parallelism, name)}" for name in DEGREES)
    fixes = ["more GPUs (--gpus)"]
    if not smallest.training.has_given_chunks:
        fixes.append("training.loss_chunk_tokens=2048")
    if keeps_fp32_moments(smallest.optimizer):
        fixes.append("optimizer.state_precision=bf16")
    return (
        f"plan search: nothing fits on {gpus} x {device.name} with {capacity}. The smallest planned "
        f"layout needs {format_bytes(result.smallest.reserved)} in {result.smallest.peak_where} ({degrees}, "
        f"training.micro_batch_size={smallest.training.micro_batch_size}, "
        f"activation_checkpoint.mode={smallest.activation_checkpoint.mode}). "
        f"Use {listed([*fixes, 'a shorter training.seq_len'])}."
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Progress line on a terminal, or a line for every best layout so far; yields the function that updates it."""
    if not sys.stderr.isatty():
        shown = ""

        def show(line: str) -> None:
            nonlocal shown
            _, _, layout = line.partition("; ")
            if layout not in ("", shown):
                shown = layout
                print(layout, file=sys.stderr, flush=True)

        yield show
        return
    from titan_exp.config.command_line.terminal import Terminal

    with Terminal(stderr=True).status("starting") as status:
        yield status.update
