"""Pipeline plan: children of a model that only the first or the last stage holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePlan:
    """Stage placement of a model's children. `blocks` are split; every stage holds the children not named here."""

    first: tuple[str, ...]
    """Children of the first stage only."""
    last: tuple[str, ...]
    """Children of the last stage only."""
    shared: tuple[str, ...] = ()
    """Children of `first` whose parameters the last stage uses too, as a copy (tied embeddings)."""
