"""Gates of a launch, and requests of runs to a scheduler.

A gate refuses runs that do not fit, and models that compute something else in one of their layouts. A child process
trains a small model of the kind (`doctor/layout`). Its verdict is cached beside predictions, by this package's code,
your code, and the configuration.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, listed
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import locate
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.doctor.layout import check_layouts
from titan_exp.doctor.layout.cases import Verdict, asked_axes
from titan_exp.launch.executor import RunPlan, Submission, executor_for
from titan_exp.launch.git import mask_override
from titan_exp.launch.rank.rank_env import VISIBLE_GPUS, environment, loopback
from titan_exp.launch.run_lookup import RunEntry
from titan_exp.launch.run_status import status_rows
from titan_exp.plan.gate import (
    MemoryCheck,
    check_memory,
    explain_changes,
    explain_oom,
    explain_retries,
    fits_unsharded,
    plan_record,
)
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.predictions import FOLDER, code_digest
from titan_exp.tracking.display import format_bytes
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.tracking.run_folder.run_folder import read_json

Echo = Callable[[str], None]

CODE = ("model.architecture", "training.objective")  # keys whose code of yours a step in fp64 checks
KEYS = {
    "training": ("objective", "objective_options", "z_loss", "loss_chunk_tokens"),
    "parallelism": ("loss_parallel", "cp_method", "pp_schedule", "reshard_after_forward"),
    "data": ("document_mask", "reset_positions"),
}
"""Keys that a verdict depends on, beside the model and the axes that a run asks for."""
HINT = "plan.layout_check=off starts without this check"
MOST_FILES = 2000  # maximum number of files of your code in a cache key; without a key, a verdict is not cached


def is_checked(experiment: Experiment) -> bool:
    """True if the layouts of a run with a resolved layout are checked before it starts."""
    mode = experiment.plan.layout_check
    if mode == "off" or not asked_axes(experiment):
        return False
    foreign = bool(import_paths(experiment, CODE)) or not experiment.model.has_own_blocks
    return mode == "on" or (foreign and experiment.plan.gate != "off")


def with_layouts(memory_checks: Sequence[MemoryCheck], runs: Path, echo: Echo) -> list[MemoryCheck]:
    """Add what is wrong with a run's layouts to its check."""
    found = list(memory_checks)
    # Code that fails is refused for that.
    numbers = [n for n, check in enumerate(found) if not check.user_error and is_checked(check.experiment)]
    verdicts = layout_verdicts([found[number].experiment for number in numbers], runs / ".cache", echo)
    for number, verdict in zip(numbers, verdicts, strict=True):
        found[number] = replace(found[number], layout_error=layout_refusal(verdict), layout_notes=verdict.notes)
    return found


def layout_refusal(verdict: Verdict) -> str:
    """Text of the refusal of a run; empty if its layouts agree."""
    if not verdict.difference:
        return ""
    way = f"use {' '.join(verdict.remedies)}, or " if verdict.remedies else ""
    said = f"This run would not train like the same run on one device.\n  {verdict.difference}"
    return f"{said}\n  To go on, {way}correct the model. {HINT}."


def layout_verdicts(experiments: Sequence[Experiment], cache: Path, echo: Echo) -> list[Verdict]:
    """Verdicts about runs with resolved layouts, in order, from the cache or from a child process, which takes at most
    `plan.seconds` for each. Equal models in equal layouts are checked once."""
    keys = [cache_key(experiment) or f"run {number}" for number, experiment in enumerate(experiments)]
    paths = {key: cache / FOLDER / f"layout-{key}.json" for key in keys}
    found = {key: known for key, path in paths.items() if (known := _read(path)) is not None}
    pending = {key: run for key, run in zip(keys, experiments, strict=True) if key not in found}
    if pending:
        models = f" of {len(pending)} models" if len(pending) > 1 else ""
        echo(f"Checking the layouts{models} in fp64 on small models, which can take half a minute ...")
        for key, verdict in _in_process(pending):
            found[key] = verdict
            if not key.startswith("run ") and (verdict.agreeing or verdict.difference):
                with suppress(OSError):  # a full disk
                    paths[key].parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(paths[key], json.dumps(asdict(verdict)) + "\n", durable=False)
    return [found[key] for key in keys]


def _in_process(pending: Mapping[str, Experiment]) -> Iterator[tuple[str, Verdict]]:
    with environment({"GLOO_SOCKET_IFNAME": loopback(), VISIBLE_GPUS: ""}), PlannerProcesses(1, alone=True) as pool:
        futures = [pool.submit(check_layouts, run, run.plan.seconds) for run in pending.values()]
        for (key, run), future in zip(pending.items(), futures, strict=True):
            try:
                yield key, future.result(timeout=run.plan.seconds)
                continue
            except TimeoutError:
                reason = f"it took more than plan.seconds={run.plan.seconds:g}"
            except BrokenProcessPool:
                reason = "its process was killed"
            except Exception as error:  # a model of yours may raise anything here and still train
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield key, Verdict(notes=(f"We did not check its layouts: {reason}.",))


def cache_key(experiment: Experiment) -> str | None:
    """Cache key of a verdict; None if your code cannot be found on disk."""
    config, digest = to_dict(experiment), hashlib.sha256(code_digest().encode())
    for name in import_paths(experiment, CODE).values():
        files = list(_sources(name))
        if not 0 < len(files) <= MOST_FILES:
            return None
        for file in files:
            digest.update(file.read_bytes())
    inputs = {group: {name: config[group][name] for name in names} for group, names in KEYS.items()}
    inputs |= {"model": config["model"], "axes": [[axis.name, repr(axis.changes)] for axis in asked_axes(experiment)]}
    return hashlib.sha256(f"{digest.hexdigest()} {json.dumps(inputs, sort_keys=True)}".encode()).hexdigest()[:24]


def _sources(name: str) -> Iterator[Path]:
    """Source files of the outermost package with an `__init__.py` of an import path, or those beside its module."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        found = locate(".".join(parts[:depth]))[2]
        if found is not None and found.origin:
            folder, whole = Path(found.origin).parent, found.submodule_search_locations is not None
            yield from sorted(folder.rglob("*.py") if whole else folder.glob("*.py"))
            return


def _read(path: Path) -> Verdict | None:
    found: Verdict | None = None
    with suppress(UserError):  # damaged: the layouts are checked again
        found = read_json(path, Verdict)
    return found if found is not None and (found.agreeing or found.difference) else None


GATE_HINT = "  To start anyway, use plan.gate=warn, or plan.gate=off for no check."


def gate_run(plan: RunPlan, echo: Echo) -> RunPlan:
    """Add the memory prediction to a plan. Raises UserError if it does not fit and plan.gate=refuse."""
    if plan.is_done:
        return plan
    (memory_check,) = with_layouts(check_memory([plan.experiment], plan.runs, echo), plan.runs, echo)
    refuses = plan.experiment.plan.gate == "refuse"
    if memory_check.user_error and refuses:
        raise UserError(f"{memory_check.user_error}\n  Training would fail in the same way. {GATE_HINT.strip()}")
    if memory_check.layout_error and plan.experiment.plan.gate != "warn":
        raise UserError(memory_check.layout_error)
    if memory_check.fits is False and refuses:
        typed = list(map(mask_override, plan.overrides))
        raise UserError(f"{explain_changes(memory_check, plan.runs, echo, typed)}\n{GATE_HINT}")
    for line in gate_warnings([memory_check]):
        echo(line)
    return with_prediction(plan, memory_check)


def gate_runs(plans: Sequence[RunPlan], echo: Echo) -> list[RunPlan]:
    """Add memory predictions to plans. Raises one UserError that lists all refused runs."""
    checked = list(zip(plans, check_open_runs(plans, echo), strict=True))
    reasons = {plan.folder.path: "" if check is None else refusal(check) for plan, check in checked}
    if lines := [f"{path}: {reason}" for path, reason in reasons.items() if reason]:
        raise UserError("\n".join([*lines, GATE_HINT]))
    for line in gate_warnings([check for _, check in checked if check is not None]):
        echo(line)
    return [plan if check is None else with_prediction(plan, check) for plan, check in checked]


def check_open_runs(plans: Sequence[RunPlan], echo: Echo) -> list[MemoryCheck | None]:
    """Memory check per plan; None for finished runs."""
    found: dict[int, MemoryCheck] = {}
    open_plans = [number for number, plan in enumerate(plans) if not plan.is_done]
    for runs in dict.fromkeys(plans[number].runs for number in open_plans):
        here = [number for number in open_plans if plans[number].runs == runs]
        checks = check_memory([plans[number].experiment for number in here], runs, echo)
        found |= zip(here, with_layouts(checks, runs, echo), strict=True)
    return [found.get(number) for number in range(len(plans))]


def refusal(memory_check: MemoryCheck) -> str:
    """Reason for refusing one of several runs, by its plan.gate; empty if it is accepted."""
    gate, layout_error = memory_check.experiment.plan.gate, memory_check.layout_error
    fails = memory_check.fits is False or bool(memory_check.user_error)
    if not (fails and gate == "refuse") and not (layout_error and gate != "warn"):
        return ""
    return memory_check.user_error or layout_error or f"it does not fit: {explain_oom(memory_check)}"


def with_prediction(plan: RunPlan, memory_check: MemoryCheck) -> RunPlan:
    """Set the plan's content of plan.json."""
    found = plan_record(memory_check)
    return plan if found is None else replace(plan, prediction=json.dumps(found, indent=1) + "\n")


def gate_warnings(memory_checks: Sequence[MemoryCheck]) -> list[str]:
    """Distinct warnings about accepted runs, with the number of runs."""
    counts = Counter(filter(None, map(_warning, memory_checks)))
    counts.update(note for memory_check in memory_checks for note in memory_check.layout_notes)
    predictions = [memory_check.prediction for memory_check in memory_checks if memory_check.prediction is not None]
    counts.update(filter(None, (prediction.without_unknown for prediction in predictions)))
    return [f"{text} ({count} runs)" if count > 1 else text for text, count in counts.items()]


def predicted(plan: RunPlan) -> Iterator[str]:
    """Line on the predicted memory and speed of a run that the gate checked, if they are known."""
    found = {} if plan.prediction is None else json.loads(plan.prediction)
    needed, capacity = found.get("needed_bytes"), found.get("capacity_bytes")
    if capacity is None or not (size := needed or found["bound_bytes"]):
        return
    who = "all its processes" if needed else "each process"
    amount = format_bytes(size) + (f" for {who}" if found["processes_that_share_it"] > 1 else "")
    seconds = found.get("step_seconds")
    speed = "" if seconds is None else f"; {seconds:.3g} s per step, {found['tokens_per_second']:,.0f} tokens/s"
    memory = f"{amount} of {found['device']}'s {format_bytes(capacity)}"
    yield f"predicted: {'' if needed else 'at most '}{memory}{speed}"


def _warning(memory_check: MemoryCheck) -> str:
    if memory_check.user_error:
        return f"We expect this run to fail. {memory_check.user_error}"
    if memory_check.layout_error:
        return memory_check.layout_error
    if memory_check.fits is False:
        return f"We do not expect this run to fit: {explain_oom(memory_check)}"
    if retries := explain_retries(memory_check):
        return f"This run fits {retries}, gives cached memory back, and waits for the GPU each time."
    if memory_check.why_not and memory_check.device_memory is not None:
        return f"We could not check the memory: {memory_check.why_not}."
    return ""


def hours(text: str) -> float:
    """Parse a time limit (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to hours."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    in_hours = parts if dash or len(parts) == 3 else [0, *parts]
    return int(days or 0) * 24 + sum(part / 60**power for power, part in enumerate(in_hours))


def gpu_hours(plan: RunPlan) -> float | None:
    """Requested GPU-hours: time limit × GPUs; None without a limit or on CPU."""
    cluster = plan.experiment.cluster
    if cluster.time_limit is None or device_type(cluster) != "cuda":
        return None
    return hours(cluster.time_limit) * plan.layout.devices


def request_lines(plans: Sequence[RunPlan]) -> Iterator[str]:
    """GPUs and hours that runs ask of a scheduler, and how to ask for less if the layout of a small run only filled a
    node. Nothing for runs on CPU, or of an executor that waits: its GPUs are here anyway."""
    asking = [plan for plan in plans if device_type(plan.experiment.cluster) == "cuda"]
    asking = [plan for plan in asking if not executor_for(plan.experiment.cluster.kind).waits]
    if not asking:
        return
    counts = Counter((plan.layout.devices, plan.experiment.cluster.time_limit) for plan in asking)
    terms = []
    for (gpus, limit), count in counts.items():
        term = f"{gpus} GPU{'s' * (gpus > 1)} × {limit or 'the time limit of the site'}"
        terms.append(term if len(asking) == 1 else f"{count:,} × {term}")
    known = [value for plan in asking if (value := gpu_hours(plan)) is not None]
    total = f" = {sum(known):,.1f} GPU-hours" if len(known) == len(asking) else ""
    yield f"This asks for {' + '.join(terms)}{total}."
    small = [plan for plan in asking if plan.fills_node and not plan.folder.path.exists()]
    small = [plan for plan in small if fits_unsharded(plan.experiment, plan.runs)]
    if small:
        took = listed(sorted({plan.experiment.parallelism.dp_shard for plan in small}))
        fewer = sorted({plan.layout.devices // plan.experiment.parallelism.dp_shard for plan in small})
        whose, who, each = ("its", "this run fits", "")
        if len(asking) > 1:
            whose, who, each = "their", f"{len(small)} of these runs fit", " each"
        yield (
            f"By an upper bound of {whose} memory, {who} on {listed(fewer)} GPU{'s' * (fewer[-1] > 1)}{each}, too: "
            f"parallelism.dp_shard=1 asks for no more, where -1 filled the nodes with {took} shards."
        )


def scripts(plans: Sequence[RunPlan]) -> Iterator[tuple[Sequence[RunPlan], str]]:
    """Job script of a run for each different request, with all runs that ask the same; none without scripts."""
    groups: dict[str, list[RunPlan]] = {}
    for plan in plans:
        groups.setdefault(repr((plan.layout.cluster, plan.size)), []).append(plan)
    for group in groups.values():
        script = executor_for(group[0].experiment.cluster.kind).script(group[0])
        if script is not None:
            yield group, script


Records = list[dict[str, Any]]


def outcome_records(submissions: Sequence[Submission], labels: Sequence[str]) -> Records:
    """Row of `titan-exp status --json` of each run, with its outcome and exit code."""
    rows = _rows([submission.plan for submission in submissions], labels)
    return [
        row
        | {"outcome": submission.outcome, "exit_code": submission.exit_code}
        | {"reason": submission.reason or row["reason"], "job_id": submission.job_id or row["job_id"]}
        for row, submission in zip(rows, submissions, strict=True)
    ]


def planned_records(plans: Sequence[RunPlan], labels: Sequence[str]) -> Records:
    """Row of `titan-exp status --json` of each run, with the resources that it asks for and, in bytes and seconds, its
    prediction."""
    return [
        row
        | {"experiment_id": plan.experiment_id, "steps": plan.experiment.training.last_step}
        | {"processes": plan.layout.world_size, "nodes": plan.layout.nodes, "gpu_hours_asked": gpu_hours(plan)}
        | {"prediction": None if plan.prediction is None else json.loads(plan.prediction)}
        for row, plan in zip(_rows(plans, labels), plans, strict=True)
    ]


def script_records(plans: Sequence[RunPlan]) -> Records:
    """One job script for each different request, with the ids of the runs that ask the same."""
    return [{"run_ids": [plan.run_id for plan in group], "script": script} for group, script in scripts(plans)]


def _rows(plans: Sequence[RunPlan], labels: Sequence[str]) -> Records:
    folders = zip([plan.folder for plan in plans], labels, strict=True)
    return [
        asdict(row) for row in status_rows([RunEntry(each, label, each.path.parent.name) for each, label in folders])
    ]
