"""User code of a run: keys whose value is an import path."""

from operator import attrgetter

from titan_exp.config.errors.user_code import package_prefix
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.import_path import IMPORT_PATH_KEYS, is_dotted


def import_paths(experiment: Experiment) -> dict[str, str]:
    """Import paths of a run's components by key; empty if all are built in."""
    values = {key: attrgetter(key)(experiment) for key in IMPORT_PATH_KEYS}
    return {key: name for key, name in values.items() if is_dotted(name)}


def user_packages(experiment: Experiment) -> list[str]:
    """Prefixes of the module names of a run's user code."""
    return sorted({package_prefix(name) for name in import_paths(experiment).values()})
