"""Run plan: run id, experiment id, related runs that a new run can continue, and the run folder.

Planning checks a run and computes its id without writing. The folder is written under a temporary name and renamed.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.checkpoint_files import initial_folder, is_url, normalize_parent, saved_state, step_of
from titan_exp.config.devices import offered_devices
from titan_exp.config.errors.explained_errors import REMEDIES
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import shipped_options
from titan_exp.config.foreign_file import read_file, read_text
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.groups.training import FORMER
from titan_exp.config.hydra.nondefault import nondefault_overrides
from titan_exp.config.layout.resolved_layout import compilation, resolve_layout, with_automatic_kernels
from titan_exp.config.schema.component import is_dotted
from titan_exp.config.schema.data_sets import validation_sets
from titan_exp.config.schema.foreign_code import Trust, import_paths, signed, sources
from titan_exp.config.schema.identity_keys import LAYOUT, has_effect, idle_keys, is_among
from titan_exp.config.schema.schema import group_in_mapping, hints
from titan_exp.config.schema.typed_config import load_experiment, read_values, to_dict, to_yaml
from titan_exp.launch.executor import RunPlan, check_executor
from titan_exp.launch.git import mask_override, refuse_secrets
from titan_exp.launch.provenance import Provenance, read_provenance, refuse_other_data
from titan_exp.launch.run_lookup import run_path
from titan_exp.models.spec.lookup import model_spec
from titan_exp.optim.lr_schedule import LRSchedule
from titan_exp.rules import check
from titan_exp.rules.checkpoint import local_checkpoint
from titan_exp.tracking.run_folder.files import sync_all
from titan_exp.tracking.run_folder.folder_owner import refuse_foreign_folders
from titan_exp.tracking.run_folder.run import overrides_text, read_overrides
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, write_atomically

LAPTOP_PARAMETERS, LAPTOP_WIDTH = 1_697_472, 192
"""Parameters and width of `model=llama_laptop`, for which the learning rates of `conf/optimizer` are made."""
MANY_TIMES = 100  # number of times those parameters from which a model needs a learning rate of its own
ID_LENGTH = 12  # hex digits of an id (48 bits): collision probability 0.2 % for a million runs


def run_id(experiment: Experiment) -> str:
    """Hash of all effective keys, including the resolved layout. Raises UserError if a value has no canonical JSON."""
    return _digest(identity(experiment))


def experiment_id(experiment: Experiment) -> str:
    """Hash of all effective keys except the layout. Raises UserError if a value has no canonical JSON."""
    return _digest({key: value for key, value in identity(experiment).items() if not is_among(key, LAYOUT)})


def identity(experiment: Experiment) -> dict[str, Any]:
    """Values hashed into the run id, by dotted key: effective keys that are not at their default."""
    # Ids of older runs stay: they hashed the former names.
    former = {current: name for name, current in FORMER.items()}
    fields = [(former.get(key, key), value, default) for key, value, default in _fields(experiment)]
    idle = idle_keys({key: value for key, value, _ in fields})
    return {
        key: value for key, value, default in fields if value != default and has_effect(key) and not is_among(key, idle)
    }


def canonical(value: object, key: str = "") -> str:
    """Canonical JSON: sorted keys, no spaces, floats by `repr`. Raises UserError about `key` for other types."""
    _require_stable(value, key)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(values: dict[str, Any]) -> str:
    text = "{" + ",".join(f"{json.dumps(key)}:{canonical(values[key], key)}" for key in sorted(values)) + "}"
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _fields(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, value and dataclass default of a group's keys, recursively."""
    for field in dataclasses.fields(group):
        value, key = getattr(group, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{key}.")
        elif field.name in getattr(group, "in_run_id", ()):
            yield key, value, dataclasses.MISSING
        elif group_in_mapping(hints(type(group)).get(field.name)) is not None:
            fields = {name: list(_fields(part)) for name, part in value.items()}
            yield key, {name: {k: v for k, v, default in each if v != default} for name, each in fields.items()}, {}
        else:
            yield key, value, field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _require_stable(value: object, key: str) -> None:
    no_name = "the run would have no stable name"
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f"{key}: the key {name!r} is not text, so {no_name}. Put the key in quotes.")
            _require_stable(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: this number is not finite, so {no_name}. Use a finite one.")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        kind = type(value).__name__
        remedy = "Use text, numbers, true, false, null, lists and mappings."
        raise UserError(f"{key}={value!r}: a {kind} has no stable text, so {no_name}. {remedy}")


AUTO = "auto"  # value of `checkpoint.continue_from` that chooses the related run with the most steps
MAY_DIFFER = (
    *LAYOUT,
    "training.steps",
    "training.stop_after",
    "lr_schedule",
    *(f"checkpoint.{key}" for key in ("continue_from", "continue_step", "continue_data")),
)
NEWEST = 100  # number of run folders that are searched, newest first


@dataclass(frozen=True)
class RelatedRun:
    """Run with a checkpoint."""

    name: str
    step: int
    experiment: Experiment


def related_runs(experiment: Experiment) -> list[RelatedRun]:
    """Runs in the same folder that this experiment, of a resolved layout, can continue, most steps first."""
    wanted, own, last = _trajectory(experiment), run_id(experiment), experiment.training.last_step
    folder = Path(experiment.paths.runs).expanduser() / experiment.experiment.name
    found = [run for run in _saved_runs(folder, import_paths(experiment).values()) if run.step < last]
    found = [run for run in found if run.name.rpartition("/")[2] != own and _trajectory(run.experiment) == wanted]
    return sorted(found, key=lambda related: -related.step)


def with_auto_parent(experiment: Experiment) -> Experiment:
    """Experiment of a resolved layout that continues the run of an earlier start with `checkpoint.continue_from=auto`,
    else the related run with the most steps, or none."""
    related = related_runs(_continuing(experiment, None))
    for run in related:
        parent = run.experiment.checkpoint.continue_from
        if parent is not None and run.name.endswith(f"/{run_id(again := _continuing(experiment, parent))}"):
            return again
    return _continuing(experiment, related[0].name if related else None)


def _continuing(experiment: Experiment, parent: str | None) -> Experiment:
    return replace(experiment, checkpoint=replace(experiment.checkpoint, continue_from=parent))


def _trajectory(experiment: Experiment) -> dict[str, Any]:
    return {key: value for key, value in identity(experiment).items() if not is_among(key, MAY_DIFFER)}


def _saved_runs(folder: Path, trust: Trust) -> Iterator[RelatedRun]:
    if not folder.is_dir():
        return
    configs = sorted(folder.glob("[!.]*/config.yaml"), key=lambda path: -path.stat().st_mtime)
    for config in configs[:NEWEST]:
        state = saved_state(str(config.parent))
        if state is not None and (step := step_of(state)) is not None:
            with suppress(UserError):  # written by another version, or by another user with other code
                yield RelatedRun(f"{folder.name}/{config.parent.name}", step, load_experiment(config, trust))


def laptop_rate(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """Sentence about a large model whose learning rate nobody set: the optimizer's default is `llama_laptop`'s."""
    spec, optimizer = model_spec(experiment.model), experiment.optimizer
    option = shipped_options("optimizer").get(optimizer.name)
    if spec is None or option is None or spec.parameters < MANY_TIMES * LAPTOP_PARAMETERS:
        return
    typed = any(override.lstrip("+").startswith("optimizer.lr=") for override in overrides)
    is_default = optimizer.lr == float(yaml.safe_load(option.read_text())["lr"])
    if not typed and is_default and experiment.parametrization.name == "standard":
        yield (
            f"optimizer.lr={optimizer.lr:g} is the default, made for model=llama_laptop; this model has "
            f"{spec.parameters / LAPTOP_PARAMETERS:,.0f} times its parameters. Set it, as in "
            f"optimizer.lr={optimizer.lr * LAPTOP_WIDTH / spec.dim:.1g} (scaled by width), and the warm-up, now "
            f"lr_schedule.warmup_steps={experiment.lr_schedule.warmup_steps}; or type optimizer.lr={optimizer.lr:g} "
            "if you mean it"
        )


def rate_after_decay(experiment: Experiment) -> Iterator[str]:
    """Sentence about a learning rate that rises again: the run continues one on this machine whose decay had begun."""
    path = local_checkpoint(experiment.checkpoint, experiment.paths)
    if path is None or (step := step_of(path)) is None:
        return
    with suppress(UserError, KeyError, TypeError, ValueError):
        saved = read_values(path.parent.parent / "config.yaml")
        values = saved["lr_schedule"]
        if is_dotted(values["decay"]) or is_dotted(experiment.lr_schedule.decay):
            return
        steps, peak = saved["training"]["steps"], saved["optimizer"]["lr"]
        before = LRSchedule(LRScheduleConfig(**values), peak=peak, steps=steps)(step)
        training, peak = experiment.training, experiment.optimizer.lr
        after = LRSchedule(experiment.lr_schedule, peak=peak, steps=training.steps)(step + 1)
        if step > values["warmup_steps"] and step > steps - values["decay_steps"] and after > 1.05 * before:
            yield (
                f"the learning rate rises from {before:.3g} at step {step}, where "
                f"{experiment.checkpoint.continue_from} has decayed it, to {after:.3g} at step {step + 1}, since this "
                f"run has a schedule of {training.steps} steps"
            )


def plan_run(
    experiment: Experiment,
    overrides: Sequence[str] = (),
    folder: RunFolder | None = None,
    opened: set[str] | None = None,
) -> RunPlan:
    """Check an experiment, resolve its layout and compute its ids; writes nothing. `folder` is that of an existing run,
    which may have been moved. Runs that are planned together share `opened`, so that each source is opened once. Raises
    UserError if the run cannot start, holds credentials, or has no canonical JSON."""
    # This comes before the rules, whose messages quote values.
    refuse_secrets(to_dict(experiment))
    experiment = _with_parent(_with_initial(experiment))

    def path_of(resolved: Experiment) -> Path:
        if folder is not None:
            return Path(os.path.abspath(folder.path))
        runs = Path(os.path.abspath(Path(resolved.paths.runs).expanduser()))
        return runs / resolved.experiment.name / run_id(resolved)

    def has_begun(resolved: Experiment) -> bool:
        # A run with a checkpoint no longer needs `checkpoint.initial`.
        return saved_state(str(path_of(resolved))) is not None

    resolved = resolve_layout(check(experiment, has_begun), offered_devices(experiment.cluster))
    check_executor(resolved.cluster)
    run_folder = RunFolder(path_of(resolved))
    refuse_other_data(resolved, run_folder)
    state = run_folder.read_state()
    if resolved.data.source in sources() and (state is None or state.state != "done"):  # the gate opens your own
        _open_sources(resolved, set() if opened is None else opened)
    return RunPlan(
        resolved,
        tuple(overrides),
        run_id(resolved),
        experiment_id(resolved),
        run_folder,
        compilation=tuple(compilation(experiment)),
        fills_node=experiment.parallelism.dp_shard == -1 and resolved.parallelism.dp_shard > 1,
    )


def _open_sources(experiment: Experiment, opened: set[str]) -> None:
    """Check the sources of an experiment that are not among the `opened` ones, and add them."""
    from titan_exp.data.source_check import check_source  # imports NumPy, which --help does not need

    evaluates = experiment.evaluation.enabled
    sets = validation_sets(experiment).values() if evaluates else ()
    for data, splits in ((experiment.data, evaluates), *((found.data, False) for found in sets)):
        if (key := repr((data, splits))) not in opened:
            check_source(data, evaluates=splits)
            opened.add(key)


def plan_relaunch(folder: RunFolder, trust: bool = False) -> RunPlan:
    """Plan an existing run folder. Raises UserError if it cannot start here, or names code that is not trusted."""
    experiment = load_experiment(folder.config, trust)
    return plan_run(experiment, read_overrides(folder.overrides) or (), folder)


def _with_initial(experiment: Experiment) -> Experiment:
    """Name the run of `checkpoint.initial` by its folder, if a name or its experiment's folder is given."""
    initial = experiment.checkpoint.initial
    if not initial or is_url(initial) or initial_folder(initial) is not None:
        return experiment
    try:
        path = run_path(initial, Path(experiment.paths.runs).expanduser())
    except UserError:
        if Path(initial).expanduser().exists():
            raise  # several runs
        return experiment  # the rules explain what a run is
    return replace(experiment, checkpoint=replace(experiment.checkpoint, initial=path))


def _with_parent(experiment: Experiment) -> Experiment:
    """Name the parent of a continued run in one form, however it was typed."""
    checkpoint, runs = experiment.checkpoint, Path(experiment.paths.runs).expanduser()
    if checkpoint.continue_from == AUTO:
        return with_auto_parent(resolve_layout(experiment, offered_devices(experiment.cluster)))
    if (parent := checkpoint.continue_from) is None:
        return experiment
    if not os.path.isabs(parent) and (runs / parent / "config.yaml").is_file():
        return experiment
    parent, step = normalize_parent(run_path(parent, runs), runs)
    step = checkpoint.continue_step if checkpoint.continue_step is not None else step
    return replace(experiment, checkpoint=replace(checkpoint, continue_from=parent, continue_step=step))


def create_run_folder(plan: RunPlan, provenance: Provenance | None = None) -> bool:
    """Create the run folder if it is missing; returns True if it existed. Raises UserError if the folder belongs to
    another run, or cannot be written; a partial folder is removed."""
    target = plan.folder.path
    with explain_write_errors(target):
        exists = target.exists() or _create(plan, provenance)
        if exists:
            _require_same(plan)
            if not plan.is_done:
                refuse_foreign_folders(plan.runs, target)
    return exists


def refresh_snapshot(plan: RunPlan, last_attempt: int, provenance: Provenance | None = None) -> None:
    """Update configuration, code and environment files before another attempt, and keep replaced ones in the previous
    attempt's logs; the caller holds the run lock. Raises UserError if the folder cannot be written."""
    with explain_write_errors(plan.folder.path):
        for name, text in _snapshot(plan, provenance).items():
            path, old = plan.folder.path / name, None
            with contextlib.suppress(FileNotFoundError):
                old = read_file(path).decode(errors="surrogateescape")
            if old not in (None, text) and last_attempt:
                write_atomically(plan.folder.make_attempt_logs(last_attempt) / name, old or "")
            if old != text:
                write_atomically(path, text)


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError while writing under `path` into a UserError."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "Set paths.runs to a folder that you can write to")
        raise UserError(f"Cannot write {error.filename or path} ({error.strerror or error}). {remedy}.") from error


def _snapshot(plan: RunPlan, provenance: Provenance | None) -> dict[str, str]:
    provenance, folder, config = provenance or read_provenance(), plan.folder, to_yaml(plan.experiment)
    code = provenance.code_record(plan.experiment, run_id=plan.run_id, experiment_id=plan.experiment_id)
    texts = {
        folder.plan: plan.prediction,
        folder.config: config,
        folder.signature: signed(config, folder.signature),
        folder.overrides: overrides_text(list(map(mask_override, plan.overrides))),
        folder.nondefault: _nondefault(plan, config),
        folder.code: code.to_json(),
        folder.diff: provenance.patch(plan.experiment),
        folder.env: json.dumps(provenance.environment, indent=2) + "\n",
    }
    return {path.name: text for path, text in texts.items() if text is not None}


def _nondefault(plan: RunPlan, config: str) -> str:
    """Overrides that differ from the defaults: those in the folder, unless its configuration changes."""
    folder = plan.folder
    if (recorded := read_overrides(folder.nondefault)) is not None and read_text(folder.config) == config:
        return overrides_text(recorded)
    differing = nondefault_overrides(to_dict(with_automatic_kernels(plan.experiment)))
    return overrides_text(list(map(mask_override, differing)))


def _create(plan: RunPlan, provenance: Provenance | None) -> bool:
    """Write a temporary folder and rename it; returns True if another process created the folder first."""
    target = plan.folder.path
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        refuse_foreign_folders(plan.runs, target)
        # We do not use mkdtemp, whose folders are closed to the group that shares the runs.
        temporary = target.with_name(f".{plan.run_id}.{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            for name, text in _snapshot(plan, provenance).items():
                write_atomically(temporary / name, text, durable=False)
            RunFolder(temporary).write_state(RunState("pending", 0, time.time(), 0, None), durable=False)
            sync_all(temporary)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if target.exists():
                return True
            raise
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
    return False


def _require_same(plan: RunPlan) -> None:
    folder = plan.folder
    if not folder.config.exists():
        remedy = "Move it away, or choose another experiment.name."
        raise UserError(f"{folder.path} exists without a config.yaml, so it is not a run. {remedy}")
    found = run_id(load_experiment(folder.config, trust=import_paths(plan.experiment).values()))
    if found != plan.run_id:
        what = f"{folder.config} has changed: it now describes run {found} instead of {plan.run_id}"
        remedy = "Move the folder away, or choose another experiment.name"
        raise UserError(f"{what}, and to continue would mix the two. {remedy}.")
