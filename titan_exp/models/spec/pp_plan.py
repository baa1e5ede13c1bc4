"""What a model says of its children, so that it can be cut into pipeline stages by whoever knows no model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelinePlan:
    """The children that not every stage has; `blocks` are divided, and every stage has what is not named here."""

    first: tuple[str, ...]
    """Children of the first stage alone."""
    last: tuple[str, ...]
    """Children of the last stage alone."""
    shared: tuple[str, ...] = ()
    """Those of `first` whose parameters the last stage uses too (tied embeddings), and has a copy of."""
