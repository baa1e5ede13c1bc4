"""Search spaces and successive halving of a study, as in `search:` and `halving:` of `sweeps/NAME.yaml`."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from titan_exp.config.study.study import Direction

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
