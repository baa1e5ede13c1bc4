"""Keys whose value is an import path, and the user code that a run names by them."""

from collections.abc import Collection, Mapping
from typing import Any

from titan_exp.config.errors.user_traceback import package_prefix
from titan_exp.config.extension import provided
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import KINDS, is_builtin
from titan_exp.config.schema.import_path import is_dotted

IMPORT_PATH_KEYS = (
    "model.architecture",
    "training.objective",
    "training.parts",
    "optimizer.name",
    "parametrization.name",
    "lr_schedule.decay",
    "data.source",
    "tracking.metrics",
    "cluster.kind",
)
"""Keys that take an import path instead of a built-in name; `training.parts` takes one for each name below it,
`tracking.metrics` a list."""


def import_paths(experiment: Experiment, keys: Collection[str] = IMPORT_PATH_KEYS) -> dict[str, str]:
    """Import paths of a run's components by key, those of `keys` and of other packages' extensions; empty if all are of
    this repository."""
    family = provided("families").get(experiment.model.architecture, "titan_exp.")
    found = import_paths_in({group: vars(value) for group, value in vars(experiment).items()}, keys)
    own = family.startswith("titan_exp.") or "model.architecture" not in keys
    return found if own else {"model.architecture": family, **found}


def import_paths_in(values: Mapping[str, Any], keys: Collection[str] = IMPORT_PATH_KEYS) -> dict[str, str]:
    """Import paths by key in the values of a configuration, which are not validated. A component that is not built in
    counts as one whether or not its module exists here, since it may later."""
    found: dict[str, str] = {}
    for key in keys:
        group, _, name = key.partition(".")
        parts = values.get(group)
        value = parts.get(name) if isinstance(parts, Mapping) else None
        if isinstance(value, Mapping):
            found |= {f"{key}.{label}.name": path for label, part in value.items() if (path := _path_of(part))}
            continue
        if isinstance(value, list | tuple):
            found |= {
                f"{key}[{index}]": path for index, path in enumerate(value) if isinstance(path, str) and is_dotted(path)
            }
            continue
        is_module = group in KINDS and KINDS[group].key == name
        if isinstance(value, str) and (not is_builtin(group, value) if is_module else is_dotted(value)):
            found[key] = value
    return found


def _path_of(part: Any) -> str | None:
    """Import path of a part of training, from its values or its dataclass."""
    name = part.get("name") if isinstance(part, Mapping) else getattr(part, "name", None)
    return name if isinstance(name, str) and is_dotted(name) else None


def user_packages(experiment: Experiment) -> list[str]:
    """Prefixes of the module names of a run's user code."""
    return sorted({package_prefix(name) for name in import_paths(experiment).values()})
