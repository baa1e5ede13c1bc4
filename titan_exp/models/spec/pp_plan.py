"""Pipeline plan: children of a model that only the first or the last stage holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePlan:
    """Stage placement of a model's children. `blocks` are split; every stage holds what is not named here."""

    first: tuple[str, ...]
    """Children of the first stage alone."""
    last: tuple[str, ...]
    """Children of the last stage alone."""
    shared: tuple[str, ...] = ()
    """Those of `first` whose parameters the last stage uses too (tied embeddings), and has a copy of."""
