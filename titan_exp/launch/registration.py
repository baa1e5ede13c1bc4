"""Registration of a question: a study's two points, its metric, scale and stopping rule, fixed before the first run."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from titan_exp.config.errors.user_error import listed
from titan_exp.config.study.study import Direction
from titan_exp.tracking.display import format_count

Outcome = Literal["better", "worse", "undecided", "continue"]
"""Outcome about the candidate; `continue` while a look is still to come."""


@dataclass(frozen=True)
class Registration:
    """Question of a study, as recorded in study.json before the first run."""

    candidate: str
    """Variant that may be better than the baseline."""
    baseline: str
    """Variant that it is compared with."""
    arms: tuple[str, str]
    """Ids of the candidate's and the baseline's configuration, without the seed."""
    metric: str
    """Metric at the end of a run."""
    better: Direction
    """Better direction of the metric."""
    validation: str
    """Source and size of the validation set."""
    parameters: int | None
    """Parameters of the baseline's model, embeddings included; None of a class of the user's own."""
    tokens: int
    """Tokens that the baseline is trained on."""
    looks: tuple[int, ...]
    """Number of pairs at each look."""
    anytime: bool
    """True if every number of pairs may be looked at, by an e-value."""
    alpha: float
    """Error rate over all looks."""
    futility: bool
    """True if the study stops early where a gain has become unlikely."""
    tries: int
    """Number of questions that share the error rate."""
    seeds: tuple[int, ...]
    """Seed of both runs of each pair."""
    time: float = 0.0
    """Unix time of the registration."""
    changed: tuple[str, ...] = ()
    """Changes after the first look, which void the error rate."""
    id: str = ""
    """Name of the question in the ledger, drawn at its registration; empty in a record of an earlier version."""

    @property
    def scale(self) -> str:
        """Parameters and tokens in words."""
        size = "" if self.parameters is None else f"{format_count(self.parameters)} parameters and "
        return f"{size}{format_count(self.tokens)} tokens"

    @property
    def when(self) -> str:
        """Looks in words."""
        return (
            f"after each pair from the third to number {self.looks[-1]}"
            if self.anytime
            else f"after {listed(self.looks, 'and')} pairs"
        )

    @property
    def rule(self) -> str:
        """Stopping rule and error rate in words."""
        among = "" if self.tries == 1 else f" among {self.tries} tries"
        return f"looks {self.when}{'' if self.futility else ', without futility'}, alpha {self.alpha:g}{among}"

    def changes(self, before: "Registration", keys: Sequence[str] = ()) -> list[str]:
        """Fields that differ from an earlier registration, as `alpha: 0.05 → 0.1`. `keys` says in the same way how the
        configurations differ, of which a registration has only the ids."""
        names = [field.name for field in fields(self) if field.name not in ("seeds", "time", "changed", "id")]
        pairs = [(name, getattr(before, name), getattr(self, name)) for name in names]
        found = {
            name: f"{_NAMES.get(name, name)}: {_text(old)} → {_text(new)}" for name, old, new in pairs if old != new
        }
        if keys and found.pop("arms", ""):
            return [*keys, *found.values()]
        return [*found.values()]


_NAMES = {"arms": "configuration of a run", "looks": "looks at pairs"}
"""Fields that a user knows by another name."""


def _text(value: object) -> str:
    return ", ".join(map(_text, value)) if isinstance(value, tuple) else str(value)
