"""Keys whose value is an import path, and the user code that a run names by them."""

from collections.abc import Collection, Mapping
from typing import Any

from titan_exp.config.errors.user_traceback import package_prefix
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.import_path import is_dotted

IMPORT_PATH_KEYS = (
    "model.architecture",
    "training.objective",
    "training.parts",
    "optimizer.name",
    "parametrization.name",
    "lr_schedule.decay",
    "data.source",
    "cluster.kind",
)
"""Keys that take an import path instead of a built-in name; `training.parts` takes one for each name below it."""


def import_paths(experiment: Experiment) -> dict[str, str]:
    """Import paths of a run's components by key; empty if all are built in."""
    return import_paths_in({group: vars(value) for group, value in vars(experiment).items()})


def import_paths_in(values: Mapping[str, Any]) -> dict[str, str]:
    """Import paths by key in the values of a configuration, which are not validated."""
    found: dict[str, str] = {}
    for key in IMPORT_PATH_KEYS:
        group, _, name = key.partition(".")
        parts = values.get(group)
        value = parts.get(name) if isinstance(parts, Mapping) else None
        named = {key: value}
        if isinstance(value, Mapping):
            named = {f"{key}.{label}.name": _name_of(part) for label, part in value.items()}
        found |= {own: path for own, path in named.items() if isinstance(path, str) and is_dotted(path)}
    return found


def is_imported(key: str, imports: Collection[str]) -> bool:
    """True if a key with an import path is one of those, or below one."""
    return any(key == other or key.startswith(f"{other}.") for other in imports)


def _name_of(part: Any) -> Any:
    return part.get("name") if isinstance(part, Mapping) else getattr(part, "name", None)


def user_packages(experiment: Experiment) -> list[str]:
    """Prefixes of the module names of a run's user code."""
    return sorted({package_prefix(name) for name in import_paths(experiment).values()})
