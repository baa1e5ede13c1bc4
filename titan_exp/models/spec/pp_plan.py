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
    """Children of `first` whose parameters are the head's too, so that the last stage has a copy (tied embeddings)."""
    looked_up: tuple[str, ...] = ()
    """Children of `first` that the last stage calls too, with a copy of their parameters (multi-token prediction)."""
    extra_tokens: int = 0
    """Tokens of `dim` numbers that stages send each other beside those of the sequence (a conditioning)."""

    @property
    def copied(self) -> tuple[str, ...]:
        """Children of `first` that the last stage has a copy of."""
        return tuple(dict.fromkeys((*self.shared, *self.looked_up)))
