"""Keys whose value is an import path, and the user code that a run names by them."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_traceback import package_prefix
from titan_exp.config.extension import provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.import_path import is_dotted

IMPORT_PATH_KEYS = (
    "model.architecture",
    "training.objective",
    "optimizer.name",
    "parametrization.name",
    "lr_schedule.decay",
    "data.source",
    "cluster.kind",
)
"""Keys that take an import path instead of a built-in name."""


def import_paths(experiment: Experiment) -> dict[str, str]:
    """Import paths of a run's components by key, those of other packages' extensions included; empty if all are of
    this repository."""
    family = provided("families").get(experiment.model.architecture, "")
    found = import_paths_in({group: vars(value) for group, value in vars(experiment).items()})
    return found if family.startswith("titan_exp.") or not family else {"model.architecture": family, **found}


def import_paths_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Import paths by key in the values of a configuration, which are not validated."""
    found: dict[str, str] = {}
    for key in IMPORT_PATH_KEYS:
        group, _, name = key.partition(".")
        parts = values.get(group)
        value = parts.get(name) if isinstance(parts, Mapping) else None
        if isinstance(value, str) and is_dotted(value):
            found[key] = value
    return found


def user_packages(experiment: Experiment) -> list[str]:
    """Prefixes of the module names of a run's user code."""
    return sorted({package_prefix(name) for name in import_paths(experiment).values()})
