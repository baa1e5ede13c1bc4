"""Runs of the same experiment in another layout or with other steps, which a new run can continue."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.checkpoint_paths import saved_state, step_of
from titan_exp.config.schema.foreign_code import Trust
from titan_exp.config.schema.identity_keys import LAYOUT, is_among
from titan_exp.config.schema.import_path_keys import import_paths
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.run_id import identity, run_id

AUTO = "auto"
"""Value of `checkpoint.continue_from` that takes the related run with the most steps."""
MAY_DIFFER = (
    *LAYOUT,
    "training.steps",
    "training.stop_after",
    "lr_schedule",
    *(f"checkpoint.{key}" for key in ("continue_from", "continue_step", "continue_data")),
)
"""Keys that may differ between related runs."""
NEWEST = 100
"""Run folders looked at, the newest first."""


@dataclass(frozen=True)
class RelatedRun:
    """Run with a checkpoint."""

    name: str
    """NAME/ID."""
    step: int
    """Step of its newest checkpoint."""
    experiment: Experiment


def related_runs(experiment: Experiment) -> list[RelatedRun]:
    """Runs in the same folder that a run of this experiment can continue, those with the most steps first.

    The layout of the experiment is resolved. Runs of as many steps as it has, and the run itself, are left out.
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
    """Experiment with `checkpoint.continue_from=auto` replaced by a run: that of an earlier start with auto, the
    related run with the most steps, or none. The layout is resolved."""
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
