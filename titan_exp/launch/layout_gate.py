"""Layout gate: refuses runs whose model computes something else in one of the layouts that they ask for.

A child process trains a small model of the kind (`doctor/layout`). Its verdict is cached beside predictions, by this
package's code, your code, and the configuration.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import locate
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.doctor.layout.cases import Verdict, asked_axes
from titan_exp.doctor.layout.check import check_layouts
from titan_exp.launch.rank.rank_env import VISIBLE_GPUS, environment, loopback
from titan_exp.plan.gate import MemoryCheck
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.predictions import FOLDER, code_digest
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
        found[number] = replace(found[number], layout_error=refusal(verdict), layout_notes=verdict.notes)
    return found


def refusal(verdict: Verdict) -> str:
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
