"""Study definition: a question, axes, and fixed overrides, as in `sweeps/NAME.yaml`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

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


Method = Literal["random", "sobol", "optuna"]
METHODS: tuple[str, ...] = get_args(Method)
RangeKind = Literal["log_uniform", "uniform", "integer", "choice"]
RANGE_KINDS: tuple[str, ...] = get_args(RangeKind)
DIGITS = 4
"""Significant digits of a drawn value, so that labels and run ids are short."""


@dataclass(frozen=True)
class Range:
    """Values of one key."""

    key: str
    """Varied key of the configuration."""
    kind: RangeKind
    """Numbers evenly spread, or so in their logarithm, or listed values."""
    low: float = 0.0
    """Lower bound, included; unused by a choice."""
    high: float = 0.0
    """Upper bound, included; unused by a choice."""
    choices: tuple[str, ...] = ()
    """Values of a choice, in override syntax."""

    def value(self, u: float) -> str:
        """Value at `u` in [0, 1), in override syntax."""
        match self.kind:
            case "choice":
                return self.choices[int(u * len(self.choices))]
            case "integer":
                return str(int(self.low) + int(u * (self.high - self.low + 1)))
            case "uniform":
                return self.text(self.low + u * (self.high - self.low))
        return self.text(self.low * math.exp(u * math.log(self.high / self.low)))

    def text(self, value: float) -> str:
        """A number of this range in override syntax, rounded to DIGITS."""
        if self.kind == "integer":
            return str(round(value))
        rounded = float(f"{value:.{DIGITS}g}")
        inside = min(max(rounded, self.low), self.high)
        return f"{inside:.{DIGITS}g}" if inside == rounded else repr(inside)

    def record(self) -> dict[str, Any]:
        """Kind and, of numbers, bounds."""
        bounds = {} if self.kind == "choice" else {"low": self.low, "high": self.high}
        return {"kind": self.kind, **bounds}

    @property
    def samples(self) -> tuple[str, ...]:
        """Values that stand for all others: each of a choice, else the lower bound."""
        return self.choices or (self.text(self.low),)


@dataclass(frozen=True)
class Search:
    """Points drawn from ranges."""

    method: Method
    """Independent random points, a Sobol sequence, or Optuna's proposals."""
    points: int
    """Number of points; a larger one keeps the first points of `random` and `sobol`, and whole batches of `optuna`."""
    seed: int
    """Seed of the points, not of the runs."""
    ranges: tuple[Range, ...]
    """Ranges, one for each varied key."""
    batch: int = 0
    """Points that Optuna draws at a time, each batch from the results of those before; 0 for other methods."""
    metric: str = ""
    """Metric that Optuna improves; empty for other methods."""
    better: Direction = "min"
    """Better direction of the metric."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of all ranges."""
        return tuple(one.key for one in self.ranges)


@dataclass(frozen=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016): the best points of each rung continue to the next."""

    metric: str
    """Metric at the end of a rung, by which points are ranked."""
    better: Direction
    """Better direction of the metric."""
    rungs: tuple[Fraction, ...]
    """Step at which each rung ends; fractions of `training.steps` if the last one is 1."""
    keep: Fraction
    """Fraction of the points of a rung that continues, rounded down, at least one point."""

    @property
    def is_relative(self) -> bool:
        """True if rungs are fractions of `training.steps`."""
        return self.rungs[-1] == 1

    def stop_after(self, rung: int) -> str | None:
        """Override value of `training.stop_after` for a rung, counted from 0; None for the last, which trains to the
        end."""
        if rung == len(self.rungs) - 1:
            return None
        step = self.rungs[rung]
        share = f"'${{share_of:{float(step):.10g},${{training.steps}}}}'"
        return share if self.is_relative else str(step)

    def steps(self, whole: int) -> list[int]:
        """Step at which each rung of a run of `whole` steps ends."""
        return [round(float(f"{float(rung):.10g}") * whole) if self.is_relative else int(rung) for rung in self.rungs]

    def kept(self, count: int) -> int:
        """Number of points that continue, of `count` in a rung."""
        return max(1, math.floor(count * self.keep))
