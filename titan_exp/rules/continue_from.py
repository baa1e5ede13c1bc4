"""Rules of a continued run: its parent has a checkpoint, and fits."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.run import PathsConfig, RunConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.paths.checkpoint_paths import COMPLETE_NAME
from titan_exp.config.paths.parent_run import parent_checkpoint, parent_location
from titan_exp.config.paths.remote_url import is_url, problem_of_url
from titan_exp.rules.rule import Refuse, rules

FIELD = "checkpoint.continue_from"
MAY_DIFFER = ("name", "attention_backend", "context")
"""Keys of the model that change no weight."""


def parent_has_a_checkpoint(checkpoint: CheckpointConfig, paths: PathsConfig) -> Iterator[Violation]:
    """The parent has a complete checkpoint of the step. URLs are opened when the run starts."""
    if checkpoint.continue_from is None:
        return
    location = parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    if is_url(location):
        if (problem := problem_of_url(location)) is not None:
            yield Violation(FIELD, location.partition("://")[0] + "://…", *problem)
    elif _local_checkpoint(checkpoint, paths) is None:
        step = "" if checkpoint.continue_step is None else f" of step {checkpoint.continue_step}"
        remedy = "a run with checkpoints: ls -d runs/*/*/checkpoints/step-* lists them"
        yield Violation(FIELD, checkpoint.continue_from, f"it has no complete checkpoint{step}", remedy)


def steps_are_left(checkpoint: CheckpointConfig, paths: PathsConfig, training: TrainingConfig) -> Iterator[Violation]:
    """The run has more steps than the checkpoint of a parent on this machine."""
    path = _local_checkpoint(checkpoint, paths)
    complete = COMPLETE_NAME.fullmatch(path.name) if path else None
    if complete and int(complete[1]) >= training.steps:
        reason = f"the checkpoint of {checkpoint.continue_from} is of step {int(complete[1])}"
        yield Violation("training.steps", training.steps, reason, f"training.steps above {int(complete[1])}")


def parent_fits(
    checkpoint: CheckpointConfig, paths: PathsConfig, model: ModelConfig, optimizer: OptimizerConfig, run: RunConfig
) -> Iterator[Violation]:
    """A parent on this machine has the same model, optimizer and seed."""
    path = _local_checkpoint(checkpoint, paths)
    saved = None if path is None else _saved_config(path.parent.parent)
    if saved is not None:
        yield from misfits(saved, checkpoint, model, optimizer, run)


def misfits(
    saved: Mapping[str, Any],
    checkpoint: CheckpointConfig,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    run: RunConfig,
) -> Iterator[Violation]:
    """Values that must be those of the parent's configuration, and are not."""
    weights_alone = f"checkpoint.initial={checkpoint.continue_from}, which takes weights alone"
    own = {f"model.{key}": value for key, value in _flat(dataclasses.asdict(model)) if key not in MAY_DIFFER}
    for key, value in own.items():
        theirs = _value(saved, key)
        if theirs is not _MISSING and theirs != value:
            yield Violation(key, value, f"{checkpoint.continue_from} has {theirs}", f"{key}={theirs}")
    if (theirs := _value(saved, "optimizer.name")) not in (_MISSING, optimizer.name):
        reason = f"the optimizer state of {checkpoint.continue_from} is that of {theirs}"
        yield Violation("optimizer.name", optimizer.name, reason, f"optimizer={theirs}; or {weights_alone}")
    if checkpoint.continue_data == "same" and (seed := _value(saved, "experiment.seed")) not in (_MISSING, run.seed):
        remedy = f"experiment.seed={seed}; or checkpoint.continue_data=restart"
        yield Violation("experiment.seed", run.seed, f"the data of {checkpoint.continue_from} have seed {seed}", remedy)


_MISSING = object()


def _value(saved: Mapping[str, Any], key: str) -> Any:
    node: Any = saved
    for part in key.split("."):
        node = node.get(part, _MISSING) if isinstance(node, Mapping) else _MISSING
    return node


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _local_checkpoint(checkpoint: CheckpointConfig, paths: PathsConfig) -> Path | None:
    """Checkpoint of a parent on this machine."""
    if checkpoint.continue_from is None:
        return None
    location = parent_location(checkpoint.continue_from, Path(paths.runs).expanduser())
    return None if is_url(location) else parent_checkpoint(location, checkpoint.continue_step)


def _saved_config(run: Path) -> Mapping[str, Any] | None:
    try:
        saved = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return saved if isinstance(saved, Mapping) else None


RULES = rules(
    Refuse(
        "checkpoint.continue_step",
        lambda checkpoint: checkpoint.continue_step is not None and checkpoint.continue_from is None,
        "checkpoint.continue_from is null, so that there is no such checkpoint",
        "checkpoint.continue_from=RUN, or leave it out",
    ),
    Refuse(
        "checkpoint.continue_from",
        lambda checkpoint: checkpoint.continue_from is not None and checkpoint.initial is not None,
        "checkpoint.initial gives the weights already",
        "one of the two: continue_from takes the whole state, initial the weights alone",
    ),
)
"""Rules checked at every start."""

BEGINNING_RULES = rules(parent_has_a_checkpoint, steps_are_left, parent_fits)
"""Rules about the parent, skipped once the run has a checkpoint of its own."""
