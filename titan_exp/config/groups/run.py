"""Groups `experiment` and `paths`: name and seed of a run, folder of runs."""

from dataclasses import dataclass

from titan_exp.config.groups.types import Count


@dataclass(frozen=True)
class RunConfig:
    """Group `experiment`."""

    name: str
    """Folder of the run under `paths.runs`; letters, digits, `.`, `_` and `-`. E.g. `experiment.name=my_idea`."""
    seed: Count
    """Seed of initial weights, data order and every random draw in training. E.g. `experiment.seed=1`."""
    tags: tuple[str, ...]
    """Labels of the run; they do not change what is computed. E.g. `experiment.tags='[debug,tp]'`."""
    notes: str
    """Comment on the run; it does not change what is computed. E.g. `experiment.notes='does warm-up matter?'`."""


@dataclass(frozen=True)
class PathsConfig:
    """Group `paths`."""

    runs: str
    """Folder that holds every run folder. E.g. `paths.runs=/scratch/runs`."""
