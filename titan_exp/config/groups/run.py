"""Group `experiment`: what the run is called and its seed; and where runs are kept."""

from dataclasses import dataclass

from titan_exp.config.groups.types import Count


@dataclass(frozen=True)
class RunConfig:
    """The key `experiment`: a name for people, a seed for the computation."""

    name: str
    """Folder of the run under `paths.runs`; letters, digits, `.`, `_` and `-`."""
    seed: Count
    """Seed of initial weights, data order and every random draw in training."""
    tags: tuple[str, ...]
    """Words to find the run by later; they do not change what is computed."""
    notes: str
    """A sentence for whoever reads the run later; it does not change what is computed."""


@dataclass(frozen=True)
class PathsConfig:
    """The key `paths`: places on disk."""

    runs: str
    """Folder that holds every run folder."""
