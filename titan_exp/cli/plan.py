"""Predict memory and speed of a run before it is launched, or rank all layouts for a cluster (plan search)."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.cli.hydra_command import OutputFile, run_with_hydra
from titan_exp.config.command_line.options import HELP, SWITCHES, VALUED, options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import PlanOptions, PlanSearchOptions
from titan_exp.config.devices import device_type, offered_devices
from titan_exp.config.errors.user_error import UserError, listed, nearest
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import keeps_fp32_moments
from titan_exp.config.layout.axes import DEGREES, ONE_DEVICE
from titan_exp.config.layout.resolved_layout import ResolvedLayout, compilation, resolve_layout
from titan_exp.config.schema.schema import OTHER_NAMES
from titan_exp.tracking.display import format_bytes

if TYPE_CHECKING:
    from titan_exp.config.groups.parallelism import QuantizationConfig
    from titan_exp.plan.devices import Device, DeviceMemory
    from titan_exp.plan.gate import MemoryCheck
    from titan_exp.plan.layout_search import SearchResult
    from titan_exp.plan.layouts import SearchSpace


def device_for(experiment: Experiment, key: str | None) -> "DeviceMemory":
    """Device and memory of a run with a resolved layout. Raises UserError if the device table lacks the GPU."""
    from titan_exp.models.spec.lookup import model_spec
    from titan_exp.plan.devices import DEVICES, device_memory_of, device_named, memory_of_gpu, refine_gpu

    layout, spec = ResolvedLayout.of(experiment), model_spec(experiment.model)
    runs = Path(experiment.paths.runs).expanduser()
    if key is not None:
        device = refine_gpu(device_named(key), experiment.cluster, runs / ".cache")
        return memory_of_gpu(device, layout, spec)
    found = device_memory_of(layout, spec, runs)
    if found.device is None and layout.device_type == "cuda":
        kind = experiment.cluster.gpu_type or "null"
        raise UserError(f"plan: the planner does not know cluster.gpu_type={kind}. Use --device {listed(DEVICES)}.")
    return found


USAGE = """\
titan-exp plan [--device NAME] [--ranks LIST] [--html FILE] [--trace FILE] [--kernels] [--full] [--json] [--trust]
             [key=value ...]
titan-exp plan search ...   rank all layouts of a cluster by speed (see titan-exp plan search --help)
  for example: titan-exp plan model=llama3_8b cluster=slurm_h100 parallelism.dp_shard=64 compile=none \\
      training.global_batch_size=64 training.seq_len=8192 training.mixed_precision=bf16

  It traces the trainer's own build and two of its steps on fake tensors, for every pipeline rank, and prints the peak
  memory with its breakdown, FLOPs, communication and an estimate of the step time. It takes the overrides of train, and
  needs neither a GPU nor the cluster. It extrapolates large models from a few traced layers and micro-batches. For a
  run that does not fit it prints changes that would make it fit, and the exit code is 3."""

NODE, GPU_NAMES = 8, OTHER_NAMES["cluster.gpus_per_node"]
"""GPUs of a node of `cluster=slurm_h100`, and names of their number in other programs."""
DOES_NOT_FIT = 3


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if argv[:1] == ["search"]:
        return run_search(argv[1:])
    if argv[:1] == ["calibrate"]:
        raise UserError(
            "titan-exp plan calibrate: there is no such verb any more, since titan-exp doctor measures the rates that "
            "a plan uses. Run titan-exp doctor on a machine with such devices, with the same paths.runs."
        )
    if set(argv) & set(HELP):
        print(options_help(USAGE, PlanOptions), end="")
        return 0
    require_no_gpus(argv)
    options, overrides = take_options(PlanOptions, argv, others=(*SWITCHES, *VALUED))
    for word in overrides[:1]:
        if word.isalpha() and nearest(word, ["search"], 1):
            raise UserError(f"titan-exp plan {word}: did you mean titan-exp plan search? An override is key=value.")
    command = shlex.join(["titan-exp", "plan", *argv])
    return run_with_hydra(overrides, lambda cfg, typed: plan_command(cfg, typed, options, command), trust=options.trust)


def require_no_gpus(argv: Sequence[str]) -> None:
    """Raise UserError about a number of GPUs, which only a search takes."""
    for word, after in pairwise([*argv, ""]):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") not in GPU_NAMES or not (equals or word.startswith("-")):
            continue
        gpus = value if equals else after
        whole = gpus.isdigit() and int(gpus) > NODE and int(gpus) % NODE == 0
        count = f"cluster.nodes={int(gpus) // NODE}" if whole else "cluster.nodes=N"
        raise UserError(
            f"titan-exp plan {name}: the cluster says how many GPUs there are. Use cluster=slurm_h100 {count}, with "
            f"{NODE} GPUs per node, or let titan-exp plan search --gpus {gpus if gpus.isdigit() else 'N'} "
            "cluster=slurm_h100 find a layout."
        )


@contextmanager
def with_device_fault(key: str | None) -> Iterator[None]:
    """Refuse an unknown `--device` together with the faults that the `with` block finds."""
    from titan_exp.plan.devices import device_named

    fault = None
    try:
        if key is not None:
            device_named(key)
    except UserError as error:
        fault = error
    try:
        yield
    except UserError as error:
        if fault is None or not error.violations:
            raise
        raise UserError(error.message, [*fault.violations, *error.violations]) from error
    if fault is not None:
        raise fault


def plan_command(cfg: Any, typed: Sequence[str], options: PlanOptions, command: str) -> int:
    """Predict a composed run and print the plan; returns the exit code. The page shows the `command`. Raises UserError
    if the run breaks a rule or cannot be predicted."""
    from titan_exp.config.command_line.help import remarks
    from titan_exp.launch.run_plan import laptop_rate
    from titan_exp.plan.planner_processes import start_forkserver
    from titan_exp.plan.prediction import check_supported
    from titan_exp.plan.predictions import FAILED
    from titan_exp.rules import check
    from titan_exp.rules.composed import read_experiment

    with with_device_fault(options.device):
        composed = read_experiment(cfg)
        experiment = resolve_layout(check(composed), offered_devices(composed.cluster))
        check_supported(experiment)
    if experiment.parallelism.pp > 1:
        start_forkserver()
    messages = sys.stderr if options.json else sys.stdout
    for sentence in (*remarks(typed, experiment), *compilation(composed), *laptop_rate(typed, experiment)):
        print(sentence, file=messages)
    memory = device_for(experiment, options.device)
    ranks = options.pipeline_ranks
    if ranks is not None and max(ranks) >= experiment.parallelism.pp:
        stages = experiment.parallelism.pp
        there = f"there is no such pipeline rank, since parallelism.pp={stages}"
        raise UserError(f"--ranks {max(ranks)}: {there}. Use 0 to {stages - 1}.")

    from titan_exp.plan.check_user_code import check_user_code, failing_user_code
    from titan_exp.plan.gate import MemoryCheck
    from titan_exp.plan.predict import predict
    from titan_exp.plan.tables import plan_to_json, print_plan

    page = None if options.html is None else OutputFile("--html", options.html, "plan.html")
    trace = None if options.trace is None else OutputFile("--trace", options.trace, "plan.json")
    with failing_user_code(experiment, FAILED):
        check_user_code(experiment)
        plan = predict(experiment, memory.device, ranks, full=options.full, worst_load=True)
    memory_check = MemoryCheck(experiment, memory, prediction=plan.prediction)
    if options.json:
        answer(plan_to_json(plan) | {"fits": memory_check.fits})
    else:
        print_plan(plan, kernels=options.kernels)
    if page is not None or trace is not None:
        from titan_exp.plan.draw import html_page, trace_json

        if page is not None:
            page.write(html_page(plan, memory_check, command))
            print(f"page: {page.path}", file=messages)
        if trace is not None:
            trace.write(trace_json(plan))
            print(f"trace: {trace.path} (open it at ui.perfetto.dev)", file=messages)
    return _verdict(memory_check, options, typed)


def _verdict(memory_check: "MemoryCheck", options: PlanOptions, typed: Sequence[str]) -> int:
    from titan_exp.launch.git import mask_override
    from titan_exp.plan.gate import explain_changes, explain_fit

    if memory_check.fits is not False:
        # On a GPU, the table already says so.
        on_cpu, whole = device_type(memory_check.experiment.cluster) == "cpu", options.pipeline_ranks is None
        if memory_check.fits and on_cpu and whole and not options.json:
            print(explain_fit(memory_check))
        return 0
    if not options.json:
        runs = Path(memory_check.experiment.paths.runs).expanduser()
        words = [*map(mask_override, typed), *([] if options.device is None else [f"--device={options.device}"])]
        print(explain_changes(memory_check, runs, print, words))
    return DOES_NOT_FIT


SEARCH_USAGE = """\
titan-exp plan search [--gpus N] [--tokens N] [--global-batch-size N] [--limit K] [--seconds N] [--device NAME]
             [--recipes LIST] [--json] ...
  for example: titan-exp plan search model=llama3_405b cluster=slurm_h100 --gpus 512 --global-batch-size 512 \\
      training.seq_len=8192 training.mixed_precision=bf16 --tokens 15e12

  It ranks every layout that fits by predicted speed: parallel degrees, pipeline schedules, micro-batch sizes and
  activation checkpointing. Near the fastest it also tries chunks of the loss, resharding, stages per rank, the method
  of context parallelism, and compile. Keys that you type stay fixed, as in parallelism.tp=8. All other overrides are as
  in train."""


def run_search(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    if set(argv) & set(HELP):
        print(options_help(SEARCH_USAGE, PlanSearchOptions), end="")
        return 0
    began = time.perf_counter()
    options, overrides = search_options(argv)
    return run_with_hydra(overrides, lambda cfg, typed: search_command(cfg, options, typed, began), trust=options.trust)


def search_options(argv: Sequence[str]) -> tuple[PlanSearchOptions, list[str]]:
    """Split the arguments into options of `plan search` and overrides. Raises UserError about an invalid option."""
    options, overrides = take_options(PlanSearchOptions, argv, others=(*SWITCHES, *VALUED), verb="plan search")
    if options.global_batch_size is not None:
        overrides.append(f"training.global_batch_size={options.global_batch_size}")
    return options, overrides


def search_command(cfg: Any, options: PlanSearchOptions, typed: Sequence[str], began: float) -> int:
    """Search the layouts of a composed run and print them; returns the exit code. The time limit counts from `began`, a
    `time.perf_counter`. Raises UserError if the run cannot be searched, or no layout fits."""
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.extrapolate.eligibility import unsupported_reason
    from titan_exp.plan.layouts import SearchSpace, fixed_keys, train_command
    from titan_exp.plan.planner_processes import start_forkserver
    from titan_exp.plan.prediction import check_supported, with_run_kernels

    with with_device_fault(options.device):
        experiment = to_experiment(cfg)
    unknown = "plan search ranks layouts by speed and has no speed model for"
    if device_type(experiment.cluster) == "cpu":
        raise UserError(f"{unknown} CPUs. Use cluster=slurm_h100, or cluster=slurm with --device h100.")
    parallelism = replace(experiment.parallelism, **ONE_DEVICE, pp_microbatches=None)
    on_one_device = resolve_layout(replace(experiment, parallelism=parallelism), 1)
    device = device_for(on_one_device, options.device).device
    assert device is not None, "a GPU is in the device table, or refused"
    gpus = options.gpus or offered_devices(experiment.cluster)
    # Unsupported options that no layout changes are refused before the search.
    check_supported(experiment, device)
    device = with_run_kernels(device, experiment)
    if experiment.training.mixed_precision == "fp32":
        remedy = "Use bf16. titan-exp plan predicts one fp32 layout."
        raise UserError(f"{unknown} fp32 on GPUs (training.mixed_precision=fp32). {remedy}")
    if (reason := unsupported_reason(on_one_device)) is not None:
        what = "plan search extrapolates from a few layers, which does not work here"
        raise UserError(f"{what}: {reason}. titan-exp plan predicts one layout.")
    start_forkserver()
    space = SearchSpace(experiment, gpus, fixed_keys(typed), _recipes(options.recipe_names, typed))

    from titan_exp.plan.layout_search import LayoutSearch
    from titan_exp.plan.tables import print_search, search_json, steps_for

    with _progress() as show:
        result = LayoutSearch(space, device, options.limit, show).run(options.seconds, began)
    if not result.rows:
        raise UserError(_explain_no_fit(result, space, device))
    tokens = None if options.tokens is None else int(options.tokens)
    more = {} if tokens is None else {"training.steps": steps_for(experiment.training, tokens)}
    commands = [train_command(row.candidate, typed, more) for row in result.rows]
    if options.json:
        answer(search_json(result, commands, tokens))
    else:
        print_search(result, device, commands, tokens)
    return 0


def _recipes(names: Sequence[str], typed: Sequence[str]) -> "dict[str, QuantizationConfig]":
    """Options of `quantization` by name, with its typed keys. Raises UserError if a name does not exist."""
    from titan_exp.config.extension import shipped_options
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment
    from titan_exp.plan.layouts import RECIPE

    known = [*shipped_options(RECIPE)]
    for name in names:
        if name not in known:
            raise UserError(f"--recipes {name}: there is no such recipe. Use {listed(known)}.")
    keys = [word for word in typed if word.startswith(f"{RECIPE}.")]
    return {name: to_experiment(compose([f"{RECIPE}={name}", *keys])).quantization for name in names}


NEXT_KEYS = ("activation_checkpoint=full", "parallelism.tp=8", "parallelism.pp=1", "training.micro_batch_size=1")
"""Keys to fix in a search that was stopped before a layout fits."""


def _explain_no_fit(result: "SearchResult", space: "SearchSpace", device: "Device") -> str:
    from titan_exp.plan.layouts import fixed_keys

    capacity, where, missed = format_bytes(device.memory), f"{space.gpus} x {device.name}", result.missed
    if result.stopped:
        found = "no layout was planned" if not result.planned else f"none of {result.planned} planned layouts fits"
        free = [key for key in NEXT_KEYS if not fixed_keys([key]) & space.fixed]
        fix = f", or fix a key that you left open, as in {free[0]}" if free else ""
        line = f"plan search: {found} in {result.seconds:.0f} s, on {where} with {capacity}. Use more --seconds{fix}."
        more = [f"  {format_bytes(cost.reserved - cost.room)} too large: {cost.overrides}" for cost in missed[:3]]
        return "\n".join([line, *more])
    if not missed and result.unknown and not result.floor:
        reason = result.unknown[0][0]
        return f"plan search: no layout can be extrapolated, because {reason}. titan-exp plan predicts one layout."
    if not missed:
        return (
            f"plan search: nothing fits on {where}: parameters, gradients and activations alone need "
            f"more than its {capacity} in every layout. Use more GPUs (--gpus), or optimizer.state_precision=bf16."
        )
    smallest = missed[0].candidate.experiment
    degrees = " ".join(f"{name}={getattr(smallest.parallelism, name)}" for name in DEGREES)
    fixes = ["more GPUs (--gpus)"]
    if not smallest.training.has_given_chunks:
        fixes.append("training.loss_chunk_tokens=2048")
    if keeps_fp32_moments(smallest.optimizer):
        fixes.append("optimizer.state_precision=bf16")
    return (
        f"plan search: nothing fits on {where} with {capacity}. The smallest planned "
        f"layout needs {format_bytes(missed[0].reserved)} in {missed[0].peak_where} ({degrees}, "
        f"training.micro_batch_size={smallest.training.micro_batch_size}, "
        f"activation_checkpoint.mode={smallest.activation_checkpoint.mode}). "
        f"Use {listed([*fixes, 'a shorter training.seq_len'])}."
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield the function that updates the progress line on a terminal; elsewhere, it prints each best layout so far."""
    if not sys.stderr.isatty():
        shown = ""

        def show(line: str) -> None:
            nonlocal shown
            layout = line.partition("; ")[2]
            if layout not in ("", shown):
                shown = layout
                print(layout, file=sys.stderr, flush=True)

        yield show
        return
    from titan_exp.config.command_line.terminal import Terminal

    with Terminal(stderr=True).status("starting") as status:
        yield status.update
