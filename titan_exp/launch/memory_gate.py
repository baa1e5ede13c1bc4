"""Gates of a launch: refuse runs that do not fit, and models that compute something else in one of their layouts.

A child process trains a small model of the kind (`doctor/layout`). Its verdict is cached beside predictions, by this
package's code, your code, and the configuration.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import locate
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.doctor.layout.cases import Verdict, asked_axes, check_layouts
from titan_exp.launch.git import mask_override
from titan_exp.launch.rank.rank_env import VISIBLE_GPUS, environment, loopback
from titan_exp.launch.run_plan import RunPlan
from titan_exp.plan.changes import explain_changes
from titan_exp.plan.gate import MemoryCheck, check_memory, explain_oom, explain_retries, plan_record
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.predictions import FOLDER, code_digest
from titan_exp.tracking.display import format_bytes
from titan_exp.tracking.run_folder.files import write_atomically

Echo = Callable[[str], None]

CODE = ("model.architecture", "training.objective")
"""Keys whose code of yours a step in fp64 checks."""
KEYS = {
    "training": ("objective", "objective_options", "z_loss", "loss_chunk_tokens"),
    "parallelism": ("loss_parallel", "cp_method", "pp_schedule", "reshard_after_forward"),
    "data": ("document_mask", "reset_positions"),
}
"""Keys that a verdict depends on, beside the model and the axes that a run asks for."""
HINT = "plan.layout_check=off starts without this check"
MOST_FILES = 2000
"""Maximum number of files of your code in a cache key; without a key, a verdict is not cached."""


def is_checked(experiment: Experiment) -> bool:
    """True if the layouts of a run with a resolved layout are checked before it starts."""
    mode = experiment.plan.layout_check
    if mode == "off" or not asked_axes(experiment):
        return False
    foreign = bool(import_paths(experiment, CODE)) or not experiment.model.has_own_blocks
    return mode == "on" or (foreign and experiment.plan.gate != "off")


def with_layouts(memory_checks: Sequence[MemoryCheck], runs: Path, echo: Echo) -> list[MemoryCheck]:
    """Add what is wrong with a run's layouts to its check."""
    # Code that fails is refused for that.
    numbers = [number for number, check in enumerate(memory_checks) if not check.user_error]
    numbers = [number for number in numbers if is_checked(memory_checks[number].experiment)]
    verdicts = layout_verdicts([memory_checks[number].experiment for number in numbers], runs / ".cache", echo)
    found = list(memory_checks)
    for number, verdict in zip(numbers, verdicts, strict=True):
        found[number] = replace(found[number], layout_error=layout_refusal(verdict), layout_notes=verdict.notes)
    return found


def layout_refusal(verdict: Verdict) -> str:
    """Text of the refusal of a run; empty if its layouts agree."""
    if not verdict.difference:
        return ""
    way = f"use {' '.join(verdict.remedies)}, or correct the model" if verdict.remedies else "correct the model"
    return (
        f"This run would not train like the same run on one device.\n  {verdict.difference}\n  To go on, {way}. {HINT}."
    )


def layout_verdicts(experiments: Sequence[Experiment], cache: Path, echo: Echo) -> list[Verdict]:
    """Verdicts about runs with resolved layouts, in order, from the cache or from a child process, which takes at most
    `plan.seconds` for each. Equal models in equal layouts are checked once. `echo` is called with a line before slow
    work."""
    keys = [cache_key(experiment) or f"run {number}" for number, experiment in enumerate(experiments)]
    found = {key: known for key in keys if (known := _read(cache / FOLDER / f"layout-{key}.json")) is not None}
    pending = {key: run for key, run in zip(keys, experiments, strict=True) if key not in found}
    if pending:
        models = f" of {len(pending)} models" if len(pending) > 1 else ""
        echo(f"Checking the layouts{models} in fp64 on small models, which can take half a minute ...")
        for key, verdict in _in_process(pending):
            found[key] = verdict
            if not key.startswith("run ") and (verdict.agreeing or verdict.difference):
                _write(cache / FOLDER / f"layout-{key}.json", verdict)
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


def _write(path: Path, verdict: Verdict) -> None:
    with suppress(OSError):  # a full disk
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(verdict)) + "\n", durable=False)


def _read(path: Path) -> Verdict | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(map(str, values[name])) for name in ("remedies", "agreeing", "notes")}
        return Verdict(difference=str(values["difference"]), seconds=float(values["seconds"]), **lists)
    except (OSError, ValueError, TypeError, KeyError):
        return None


USER_CODE_HINT = (
    "  Training would fail in the same way. To start anyway, use plan.gate=warn, or plan.gate=off for no check."
)
GATE_HINT = "  To start anyway, use plan.gate=warn, or plan.gate=off for no check."


def gate_run(plan: RunPlan, echo: Echo) -> RunPlan:
    """Add the memory prediction to a plan. Raises UserError if it does not fit and plan.gate=refuse."""
    if is_done(plan):
        return plan
    (memory_check,) = with_layouts(check_memory([plan.experiment], _runs(plan), echo), _runs(plan), echo)
    if memory_check.user_error and plan.experiment.plan.gate == "refuse":
        raise UserError(f"{memory_check.user_error}\n{USER_CODE_HINT}")
    if memory_check.layout_error and plan.experiment.plan.gate != "warn":
        raise UserError(memory_check.layout_error)
    if memory_check.fits is False and plan.experiment.plan.gate == "refuse":
        typed = list(map(mask_override, plan.overrides))
        raise UserError(f"{explain_changes(memory_check, _runs(plan), echo, typed)}\n{GATE_HINT}")
    for line in gate_warnings([memory_check]):
        echo(line)
    return with_prediction(plan, memory_check)


def gate_runs(plans: Sequence[RunPlan], echo: Echo) -> list[RunPlan]:
    """Add memory predictions to plans. Raises one UserError that lists all refused runs."""
    checked = list(zip(plans, check_open_runs(plans, echo), strict=True))
    refused = [(plan, check) for plan, check in checked if check is not None and is_refused(check)]
    if refused:
        lines = [f"{plan.folder.path}: {refusal(check)}" for plan, check in refused]
        raise UserError("\n".join([*lines, GATE_HINT]))
    for line in gate_warnings([check for _, check in checked if check is not None]):
        echo(line)
    return [plan if check is None else with_prediction(plan, check) for plan, check in checked]


def check_open_runs(plans: Sequence[RunPlan], echo: Echo) -> list[MemoryCheck | None]:
    """Memory check per plan; None for finished runs."""
    found: dict[int, MemoryCheck] = {}
    open_plans = [number for number, plan in enumerate(plans) if not is_done(plan)]
    for runs in dict.fromkeys(_runs(plans[number]) for number in open_plans):
        here = [number for number in open_plans if _runs(plans[number]) == runs]
        checks = check_memory([plans[number].experiment for number in here], runs, echo)
        found |= zip(here, with_layouts(checks, runs, echo), strict=True)
    return [found.get(number) for number in range(len(plans))]


def is_refused(memory_check: MemoryCheck) -> bool:
    """True if plan.gate=refuse and the run does not fit or its user code fails, or if its layouts differ."""
    gate = memory_check.experiment.plan.gate
    fails = memory_check.fits is False or bool(memory_check.user_error)
    return (fails and gate == "refuse") or (bool(memory_check.layout_error) and gate != "warn")


def refusal(memory_check: MemoryCheck) -> str:
    """Reason for refusing one of several runs."""
    why = memory_check.user_error or memory_check.layout_error
    return why or f"it does not fit: {explain_oom(memory_check)}"


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


def is_done(plan: RunPlan) -> bool:
    """True if state.json records the run as done."""
    state = plan.folder.read_state() if plan.folder.path.exists() else None
    return state is not None and state.state == "done"


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


def _runs(plan: RunPlan) -> Path:
    return plan.folder.path.parents[1]
