"""Study: a question, the axes that answer it, and fixed overrides, as in `sweeps/NAME.yaml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Direction = Literal["min", "max"]
"""Better direction of a metric."""


@dataclass(frozen=True)
class Condition:
    """Condition that a key, or a named axis, has one of some values."""

    key: str
    """`parallelism.tp`, or the `name` of a list."""
    values: tuple[str, ...]
    """Values as overrides write them; any one of them fulfils the condition."""

    def holds(self, facts: Mapping[str, str]) -> bool:
        """True if a point has one of the values."""
        return self.key in facts and any(_same(facts[self.key], value) for value in self.values)

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Choice:
    """Point on an axis."""

    overrides: tuple[str, ...]
    """Overrides, as typed on the command line."""
    label: str
    """Label in tables: the overrides themselves, or the name in the file."""


@dataclass(frozen=True)
class Axis:
    """Axis of a study, whose points are the product of its axes."""

    name: str
    """Key of a grid, name of a list, else empty."""
    keys: tuple[str, ...]
    """Keys that every point sets; empty for a list."""
    choices: tuple[Choice, ...]
    """Its points, in the order of the file."""
    when: tuple[Condition, ...] = ()
    """The axis applies to points that fulfil all of these on the axes above it."""
    unless: tuple[Condition, ...] = ()
    """The axis does not apply to points that fulfil one of these."""


@dataclass(frozen=True)
class Exclusion:
    """Points that are left out on purpose."""

    conditions: tuple[Condition, ...]
    """A point that fulfils all of them is left out."""
    reason: str
    """Reason, as the plan prints it."""


@dataclass(frozen=True)
class Study:
    """The content of a study's file."""

    name: str
    """The file's name without its ending; also the folder of its runs."""
    path: Path
    """The file."""
    question: str
    """Question of the study, in a sentence."""
    held_fixed: tuple[str, ...]
    """Overrides of every point."""
    sizes: Mapping[str, tuple[str, ...]]
    """Further overrides by the name of a size; the first is the default, `size=NAME` chooses another."""
    axes: tuple[Axis, ...]
    """Axes that vary."""
    exclude: tuple[Exclusion, ...]
    """Points left out on purpose."""
    seeds: tuple[int, ...]
    """Every point runs once with each; empty leaves `experiment.seed` alone."""
    baseline: tuple[Condition, ...] | str | None
    """The point that the others are compared with: its label, a list's point by name, or values that only it has."""
    metrics: Mapping[str, Direction]
    """Metrics to compare, and the better direction of each."""


def split_override(text: str) -> tuple[str, str]:
    """Key and value of an override; the key without `+` or `~`."""
    key, _, value = text.partition("=")
    return key.lstrip("+~"), value


def _same(value: str, other: str) -> bool:
    try:
        return value == other or float(value) == float(other)
    except ValueError:
        return False
