"""Run id and experiment id, and related runs, which a new run can continue."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.checkpoint_files import saved_state, step_of
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import shipped_options
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import LRScheduleConfig
from titan_exp.config.groups.training import FORMER
from titan_exp.config.schema.component import is_dotted
from titan_exp.config.schema.foreign_code import Trust, import_paths
from titan_exp.config.schema.identity_keys import LAYOUT, has_effect, idle_keys, is_among
from titan_exp.config.schema.schema import group_in_mapping, hints
from titan_exp.config.schema.typed_config import load_experiment, read_values
from titan_exp.models.spec.lookup import model_spec
from titan_exp.optim.lr_schedule import LRSchedule
from titan_exp.rules.checkpoint import local_checkpoint

LAPTOP_PARAMETERS, LAPTOP_WIDTH = 1_697_472, 192
"""Parameters and width of `model=llama_laptop`, for which the learning rates of `conf/optimizer` are made."""
MANY_TIMES = 100
"""Number of times those parameters from which a model needs a learning rate of its own."""
ID_LENGTH = 12
"""Hex digits of an id (48 bits): collision probability 0.2 % for a million runs."""


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
            yield key, {name: _nondefault(part) for name, part in value.items()}, {}
        else:
            yield key, value, field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _nondefault(group: Any) -> dict[str, Any]:
    return {name: value for name, value, default in _fields(group) if value != default}


def _require_stable(value: object, key: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(
                    f"{key}: the key {name!r} is not text, so the run would have no stable name. Put the key in quotes."
                )
            _require_stable(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"{key}={value}: this number is not finite, so the run would have no stable name. Use a finite one."
        )
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise UserError(
            f"{key}={value!r}: a {type(value).__name__} has no stable text, so the run would have no "
            "stable name. Use text, numbers, true, false, null, lists and mappings."
        )


AUTO = "auto"
"""Value of `checkpoint.continue_from` that chooses the related run with the most steps."""
MAY_DIFFER = (
    *LAYOUT,
    "training.steps",
    "training.stop_after",
    "lr_schedule",
    *(f"checkpoint.{key}" for key in ("continue_from", "continue_step", "continue_data")),
)
"""Keys that may differ between related runs."""
NEWEST = 100
"""Number of run folders that are searched, newest first."""


@dataclass(frozen=True)
class RelatedRun:
    """Run with a checkpoint."""

    name: str
    """NAME/ID."""
    step: int
    """Step of its newest checkpoint."""
    experiment: Experiment


def related_runs(experiment: Experiment) -> list[RelatedRun]:
    """Runs in the same folder that this experiment can continue, most steps first.

    The experiment's layout must be resolved. Runs with at least as many steps, and the run itself, are left out.
    """
    wanted, own = _trajectory(experiment), run_id(experiment)
    trust = import_paths(experiment).values()
    found = [
        related
        for related in _saved_runs(Path(experiment.paths.runs).expanduser() / experiment.experiment.name, trust)
        if related.name.rpartition("/")[2] != own
        and related.step < experiment.training.last_step
        and _trajectory(related.experiment) == wanted
    ]
    return sorted(found, key=lambda related: -related.step)


def with_auto_parent(experiment: Experiment) -> Experiment:
    """Experiment with `checkpoint.continue_from=auto` replaced: by the run of an earlier start with auto, by the
    related run with the most steps, or by none. The layout must be resolved."""
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
        step = None if state is None else step_of(state)
        if step is None:
            continue
        try:
            yield RelatedRun(f"{folder.name}/{config.parent.name}", step, load_experiment(config, trust))
        except UserError:  # written by another version, or by another user with other code
            continue


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
    """Sentence about a learning rate that rises again, because the run continues a run on this machine whose decay had
    begun."""
    path = local_checkpoint(experiment.checkpoint, experiment.paths)
    step = None if path is None else step_of(path)
    if path is None or step is None:
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
