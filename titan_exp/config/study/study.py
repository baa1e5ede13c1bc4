"""Study definition: a question, axes, and fixed overrides, as in `sweeps/NAME.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from titan_exp.config.study.search import Halving, Search

Direction = Literal["min", "max"]
"""Better direction of a metric."""


@dataclass(frozen=True)
class Condition:
    """Condition that a key or a named axis has one of the given values."""

    key: str
    """`parallelism.tp`, or the `name` of a list."""
    values: tuple[str, ...]
    """Values in override syntax; any of them fulfils the condition."""

    def holds(self, facts: Mapping[str, str]) -> bool:
        """True if a point fulfils the condition."""
        return self.key in facts and any(_same(facts[self.key], value) for value in self.values)

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Choice:
    """Value of an axis."""

    overrides: tuple[str, ...]
    """Overrides, as typed on the command line."""
    label: str
    """Label in tables: the overrides, or the name in the file."""


@dataclass(frozen=True)
class Axis:
    """Axis of a study; its points are the product of the axes."""

    name: str
    """Key of a grid, name of a list, else empty."""
    keys: tuple[str, ...]
    """Keys set by every choice; empty for a list."""
    choices: tuple[Choice, ...]
    """Choices of the axis, in file order."""
    when: tuple[Condition, ...] = ()
    """Conditions on the axes above, all of which a point must fulfil for the axis to apply."""
    unless: tuple[Condition, ...] = ()
    """Conditions, any of which excludes a point from the axis."""


@dataclass(frozen=True)
class Exclusion:
    """Excluded points."""

    conditions: tuple[Condition, ...]
    """Conditions, all of which an excluded point fulfils."""
    reason: str
    """Reason, printed by the plan."""


@dataclass(frozen=True)
class Study:
    """Content of a study file."""

    name: str
    """File name without extension; also the folder of its runs."""
    path: Path
    """Path of the study file."""
    question: str
    """Question of the study, in a sentence."""
    held_fixed: tuple[str, ...]
    """Overrides of every point."""
    sizes: Mapping[str, tuple[str, ...]]
    """Additional overrides by size name; the first is the default, `size=NAME` selects another."""
    axes: tuple[Axis, ...]
    """Varied axes; empty in a search."""
    exclude: tuple[Exclusion, ...]
    """Excluded points."""
    seeds: tuple[int, ...]
    """Seeds of every point; empty keeps `experiment.seed`."""
    baseline: tuple[Condition, ...] | str | None
    """Point that the others are compared with: its label, a list's point by name, or values that only it has."""
    metrics: Mapping[str, Direction]
    """Compared metrics, with the better direction of each."""
    search: "Search | None" = None
    """Ranges that the points are drawn from, instead of axes."""
    halving: "Halving | None" = None
    """Successive halving over the points; None trains every point to its end."""
    tune: str = ""
    """Key over which each group of the comparison is tuned; empty without."""


def split_override(text: str) -> tuple[str, str]:
    """Key and value of an override; the key without `+` or `~`."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def _same(value: str, other: str) -> bool:
    try:
        return value == other or float(value) == float(other)
    except ValueError:
        return False
