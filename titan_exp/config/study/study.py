"""Study definition: the keys of `sweeps/NAME.yaml`, with their values as overrides of Hydra."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, MinLen

from titan_exp.config.errors.explain_values import Check, Read, Unfit
from titan_exp.config.errors.user_error import did_you_mean, listed, shown
from titan_exp.config.extension import extensions
from titan_exp.config.study.labels import hold, override, split_override, text_of
from titan_exp.config.study.ladder import Ladder, Share

METRICS = ("loss", "validation_loss", "validation_bits_per_byte", "validation_perplexity", "grad_norm")
METRICS += ("tokens_per_second", "tokens_per_second_per_device", "tflops", "mfu", "memory", "memory_reserved")
METRICS += tuple(name for one in extensions().values() for name in one.metrics)
"""Metrics logged by runs, and by those of extensions. Names with a slash (`validation_loss/code`) are metrics, too."""
MOST_SEEDS = MOST_POINTS = 10_000
"""Largest numbers of seeds of a study, and of points of a search; larger ones are typos."""
FEWEST_PAIRS, MOST_PAIRS = 3, 100
"""Fewest pairs of runs that a verdict is given of, and the most."""
ANYTIME = "anytime"
"""Value of `pairs.looks` that looks after every pair."""
DIGITS = 4
"""Significant digits of a drawn value, so that labels and run ids are short."""


def _override(value: Any) -> str:
    if isinstance(value, str) and ("=" in value or value.startswith("~")):
        return value
    typed = override(*next(iter(value.items()))) if isinstance(value, dict) and value else f"{value}=..."
    raise Unfit("an override is key=value, as on the command line", f"write {typed}")


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not values:
        raise Unfit("must be a list of values", "" if isinstance(values, list | None) else f"write [{text_of(values)}]")
    return tuple(map(text_of, values))


def _conditions(value: Any) -> dict[str, tuple[str, ...]]:
    several = {shown(key): found if isinstance(found, list) else [found] for key, found in _keys(value).items()}
    return {key: tuple(map(text_of, values)) for key, values in several.items()}


def _baseline(value: Any) -> Any:
    return value if isinstance(value, str | None) else _conditions(value)


def _exclusion(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    conditions = {key: value for key, value in entry.items() if key != "reason"}
    return {"conditions": conditions, "reason": entry.get("reason")}


def _seeds(value: Any) -> Sequence[int]:
    count = value if isinstance(value, int) and not isinstance(value, bool) else 0
    seeds = range(count) if 0 < count <= MOST_SEEDS else value
    if seeds is None:
        return ()
    if not isinstance(seeds, list | range) or not seeds or any(type(seed) is not int or seed < 0 for seed in seeds):
        reason = f"must be a number of seeds up to {MOST_SEEDS}, or a list of them"
        raise Unfit(reason, "write seeds: 3, or seeds: [0, 1, 2]")
    return tuple(dict.fromkeys(seeds))


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise Unfit("must be a number, not true or false")
    return value


def _rise(rungs: Sequence[Fraction]) -> None:
    remedy = "write rungs: [100, 300, 900], or fractions of training.steps: [1/9, 1/3, 1]"
    if len(rungs) < 2 or rungs[0] <= 0:
        raise Unfit("must be at least two steps above 0, in their order", remedy)
    if any(later <= earlier for earlier, later in pairwise(rungs)):
        ordered = ", ".join(map(str, sorted(set(rungs))))
        raise Unfit("each rung must be larger than the one before", f"write rungs: [{ordered}]")
    if rungs[-1] != 1 and any(rung.denominator != 1 for rung in rungs):
        raise Unfit("must be whole steps, or fractions of training.steps of which the last is 1", remedy)


def _is_part(keep: Fraction) -> None:
    if not 0 < keep < 1:
        raise Unfit("must be a fraction between 0 and 1", "write keep: 1/3")


def _looks(value: Any) -> Any:
    return [] if value == ANYTIME else [value] if type(value) is int else value


def _are_looks(looks: tuple[int, ...]) -> None:
    remedy = f"looks: [3, 5, 8], or looks: {ANYTIME}"
    if any(later <= earlier for earlier, later in pairwise(looks)):
        raise Unfit("numbers of pairs are not increasing", remedy)
    if looks and not FEWEST_PAIRS <= looks[0] <= looks[-1] <= MOST_PAIRS:
        raise Unfit(f"a verdict takes from {FEWEST_PAIRS} to {MOST_PAIRS} pairs", remedy)


def _is_error_rate(alpha: float) -> None:
    if not 0 < alpha < 0.5:
        raise Unfit("must be an error rate between 0 and 0.5", "alpha: 0.05")


def _have_width(bounds: tuple[float, float]) -> None:
    if bounds[0] >= bounds[1]:
        raise Unfit("must be a lower and then a higher number", f"write {sorted(bounds)}")


def _are_above_zero(bounds: tuple[float, float]) -> None:
    if bounds[0] <= 0:
        raise Unfit("a logarithm has no value at 0 or below", "give a lower bound above 0, or use uniform")


def _are_side_by_side(values: Mapping[str, Sequence[str]]) -> None:
    if len({len(texts) for texts in values.values()}) > 1:
        counts = listed([f"{key} has {len(texts)}" for key, texts in values.items()], "and")
        raise Unfit(f"zip takes values side by side, and {counts}", "give each key the same number of values")


def _is_asked(question: str) -> None:
    if not question.strip():
        raise Unfit("a study needs a question", "write one, for example question: Which learning rate is best?")


def _is_logged(metric: str) -> None:
    if metric not in METRICS and "/" not in metric:
        offer = did_you_mean(metric, METRICS) or f"runs log {listed(METRICS, 'and')}"
        raise Unfit("no run logs this metric", offer)


def usual_direction(metric: str) -> Literal["min", "max"] | None:
    """Better direction of a metric by its name: `min` of losses, perplexities, bits per byte, `max` of accuracies."""
    if any(word in metric for word in ("loss", "perplexity", "bits_per_byte")):
        return "min"
    return "max" if metric.rpartition("/")[2].startswith("acc") else None


def _one_of(kinds: Sequence[str], block: Any, what: str, example: str) -> None:
    if sum(bool(getattr(block, kind)) for kind in kinds) != 1:
        raise Unfit(f"{what} has exactly one of {listed(kinds)}", example)


def _keys(value: Any) -> Any:
    if not isinstance(value, dict | None):
        raise Unfit("must be keys with values")
    return value or {}


def _ranges(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise Unfit("must be keys, each with a range")
    return value


_NONE, _NOTHING = Read(lambda value: [] if value is None else value), Read(_keys)
Name = Annotated[str, Read(shown)]
"""Key of a mapping, whose type in YAML does not count."""
Overrides = Annotated[tuple[Annotated[str, Read(_override)], ...], _NONE]
Texts = Annotated[tuple[str, ...], Read(_texts)]
Conditions = Annotated[dict[str, tuple[str, ...]], Read(_conditions)]
"""Values by key, or by the `name` of a list; any value of a key fulfils it."""
Whole = Annotated[int, Read(_number)]
Number = Annotated[float, Read(_number)]
Bounds = Annotated[tuple[Number, Number], Check(_have_width)]
Direction = Literal["min", "max"]
"""Better direction of a metric."""
Method = Literal["random", "sobol", "optuna"]
RangeKind = Literal["log_uniform", "uniform", "integer", "choice"]


@dataclass(frozen=True)
class Choice:
    """Value of an axis."""

    overrides: tuple[str, ...]
    """Overrides, as typed on the command line."""
    label: str
    """Label in tables: the overrides, or the name in the file."""


@dataclass(frozen=True)
class Axis:
    """Axis of a study, of one kind; its points are the product of the axes."""

    grid: Annotated[dict[Name, Texts], _NOTHING] = field(default_factory=dict)
    """Values by key. With several keys, each is an axis. E.g. `grid: {optimizer.lr: [1e-3, 3e-3]}`."""
    zip: Annotated[dict[Name, Texts], _NOTHING, Check(_are_side_by_side)] = field(default_factory=dict)
    """Values of several keys, taken side by side.
    E.g. `zip: {optimizer.lr: [1e-3, 2e-3], training.steps: [200, 100]}`."""
    list: Annotated[dict[Name, Overrides], _NOTHING] = field(default_factory=dict)
    """Overrides by the name of a point. E.g. `list: {plain: [], slow: [optimizer.lr=1e-4]}`."""
    name: Annotated[str, Read(lambda value: "" if value is None else value)] = ""
    """Name of a `list`, by which conditions and the command line choose its points. E.g. `name: balance`."""
    when: Conditions = field(default_factory=dict)
    """Conditions on the axes above and on what is held fixed. The axis applies to the points that fulfil all of them.
    E.g. `when: {parallelism.cp: [2, 4]}`."""
    unless: Conditions = field(default_factory=dict)
    """Conditions that exclude a point from the axis if it fulfils any of them. E.g. `unless: {parallelism.cp: 1}`."""

    def __post_init__(self) -> None:
        _one_of(("grid", "zip", "list"), self, "an axis", "for example grid: {optimizer.lr: [1e-3, 3e-3]}")
        if self.name and not self.list:
            kind = "grid" if self.grid else "zip"
            raise Unfit(f"the axes of a {kind} have the names of their keys", f"leave the name {self.name} out")

    @property
    def set_keys(self) -> tuple[str, ...]:
        """Keys that every choice sets; none of a list."""
        return tuple(key.lstrip("+~") for key in (*self.grid, *self.zip))

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the axis sets at any of its points."""
        inside = (split_override(text)[0] for choice in self.choices for text in choice.overrides)
        return tuple(dict.fromkeys([*self.set_keys, *inside]))

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which conditions and overrides choose values: keys, or the name of a list."""
        return self.set_keys or (self.name,) * bool(self.name)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Choices of the axis, in file order."""
        if self.list:
            named = f"{self.name}=" if self.name else ""
            return tuple(Choice(texts, f"{named}{label}") for label, texts in self.list.items())
        columns = self.grid or self.zip
        rows = [tuple(map("{}={}".format, columns, row)) for row in zip(*columns.values(), strict=True)]
        return tuple(Choice(row, " ".join(row)) for row in rows)

    def facts(self, choice: Choice) -> dict[str, str]:
        """Values set by a choice, by key; for a list's point also by the list's name, or its own."""
        facts = dict(map(split_override, choice.overrides))
        label = choice.label.removeprefix(f"{self.name}=")
        return facts | {self.name or label: label} if self.list else facts

    def applies(self, facts: Mapping[str, str]) -> bool:
        """True if a point with these values has the axis."""
        return hold(self.when, facts) and not any(hold({key: values}, facts) for key, values in self.unless.items())


@dataclass(frozen=True)
class Exclusion:
    """Points that a study leaves out."""

    conditions: Conditions
    """Conditions, all of which an excluded point fulfils."""
    reason: Annotated[str, Read(lambda value: "" if value is None else shown(value))] = ""
    """Reason, which the plan prints."""


@dataclass(frozen=True)
class Range:
    """Values of one key of a search, of one kind."""

    log_uniform: Annotated[Bounds, Check(_are_above_zero)] | None = None
    """Bounds of numbers that are spread evenly in their logarithm. E.g. `{log_uniform: [1e-4, 1e-1]}`."""
    uniform: Bounds | None = None
    """Bounds of numbers that are spread evenly. E.g. `{uniform: [0, 0.2]}`."""
    integer: Annotated[tuple[Whole, Whole], Check(_have_width)] | None = None
    """Bounds of whole numbers, both included. E.g. `{integer: [2, 8]}`."""
    choice: Annotated[Texts, MinLen(2)] | None = None
    """Listed values, two or more. E.g. `{choice: [linear, sqrt]}`."""

    def __post_init__(self) -> None:
        _one_of(get_args(RangeKind), self, "a range", "for example {log_uniform: [1e-4, 1e-1]}")

    @property
    def kind(self) -> RangeKind:
        """Name of the field that is given."""
        return next(kind for kind in get_args(RangeKind) if getattr(self, kind))

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound, both included, of any kind but a choice."""
        return self.log_uniform or self.uniform or self.integer or (math.nan, math.nan)

    def value(self, u: float) -> str:
        """Value at `u` in [0, 1), in override syntax."""
        low, high = self.bounds
        if self.choice:
            return self.choice[int(u * len(self.choice))]
        if self.integer:
            return str(self.integer[0] + int(u * (high - low + 1)))
        return self.text(low + u * (high - low) if self.uniform else low * math.exp(u * math.log(high / low)))

    def text(self, value: float) -> str:
        """A number of this range in override syntax, rounded to DIGITS."""
        if self.integer:
            return str(round(value))
        rounded = float(f"{value:.{DIGITS}g}")
        inside = min(max(rounded, self.bounds[0]), self.bounds[1])
        return f"{inside:.{DIGITS}g}" if inside == rounded else repr(inside)

    def record(self) -> dict[str, Any]:
        """Kind and, of numbers, bounds."""
        return {"kind": self.kind, **({} if self.choice else dict(zip(("low", "high"), self.bounds, strict=True)))}

    @property
    def samples(self) -> tuple[str, ...]:
        """Values that stand for all others: each of a choice, else the lower bound."""
        return self.choice or (self.text(self.bounds[0]),)


@dataclass(frozen=True)
class Search:
    """Points drawn from ranges, in place of axes."""

    method: Method
    """Method that draws points: independent random ones (`random`), a Sobol sequence (`sobol`), or Optuna's proposals
    (`optuna`). E.g. `method: sobol`."""
    points: Annotated[Whole, Ge(1), Le(MOST_POINTS)]
    """Number of points. A larger one keeps the first points of `random` and `sobol`, and whole batches of `optuna`.
    E.g. `points: 16`."""
    ranges: Annotated[dict[Name, Range], Read(_ranges)]
    """Range of each key that varies. E.g. `ranges: {optimizer.lr: {log_uniform: [1e-4, 1e-1]}}`."""
    seed: Annotated[Whole, Ge(0), Le(2**31)] = 0
    """Seed of the points, not of the runs. E.g. `seed: 1`."""
    batch: Annotated[Whole, Ge(1), Le(MOST_POINTS)] | None = None
    """Number of points that Optuna draws at a time, each batch from the results of those before; 8 by default.
    E.g. `batch: 4`."""
    metric: str | None = None
    """Metric that Optuna improves; the study's first by default. E.g. `metric: validation_loss`."""


@dataclass(frozen=True)
class Halving:
    """Successive halving (Jamieson and Talwalkar 2016): the best points of each rung continue to the next."""

    rungs: Annotated[tuple[Share, ...], Check(_rise)]
    """Step at which each rung ends. They are fractions of `training.steps` if the last one is 1.
    E.g. `rungs: [1/9, 1/3, 1]`."""
    metric: str | None = None
    """Metric at the end of a rung that ranks the points; the study's first by default. E.g. `metric: loss`."""
    keep: Annotated[Share, Check(_is_part)] = Fraction(1, 3)
    """Fraction of a rung's points that continues, rounded down, and at least one point. E.g. `keep: 1/4`."""

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


@dataclass(frozen=True)
class Pairs:
    """Test of a study's two points by pairs of runs with equal seeds, registered before the first run. The error rate
    is the chance of a wrong `better` or `worse`, over all looks."""

    looks: Annotated[tuple[Whole, ...], Read(_looks), Check(_are_looks)] = (3, 5, 8)
    """Numbers of pairs after which the study may end; `anytime` looks after every pair from the third on, by
    an e-value.
    E.g. `looks: [3, 5]`."""
    most: Annotated[Whole, Ge(FEWEST_PAIRS), Le(MOST_PAIRS)] | None = None
    """Most pairs with `looks: anytime`, 12 by default. E.g. `most: 20`."""
    metric: str | None = None
    """Metric at the end of a run: the study's first by default. E.g. `metric: validation_loss`."""
    alpha: Annotated[Number, Check(_is_error_rate)] = 0.05
    """Error rate of the study, over all of its looks. E.g. `alpha: 0.01`."""
    futility: bool = True
    """Stop at a look where the candidate is not ahead, however little, and between looks once it is behind by more than
    a standard error. Half of the changes that do nothing end at the first look. This adds no wrong verdict, but leaves
    the interval wide. E.g. `futility: false`."""
    tries: Annotated[Whole, Ge(1), Le(MOST_POINTS)] = 1
    """Number of questions, this one included, among which `better` is looked for; each has its share of `alpha`.
    E.g. `tries: 10`."""

    def __post_init__(self) -> None:
        if self.looks and self.most is not None:
            raise Unfit("planned looks end with the last of them", f"leave most out, or looks: {ANYTIME}")

    @property
    def ends(self) -> tuple[int, ...]:
        """Number of pairs at each look."""
        return self.looks or tuple(range(FEWEST_PAIRS, (self.most or 12) + 1))


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """Content of a study file."""

    question: Annotated[str, Check(_is_asked)]
    """Question that the study answers, in a sentence. E.g. `question: Which learning rate is best?`."""
    held_fixed: Overrides = ()
    """Overrides of every point. E.g. `held_fixed: [model=llama_debug, training.steps=100]`."""
    sizes: Annotated[dict[Name, Overrides], _NOTHING] = field(default_factory=dict)
    """Further overrides by the name of a size. The first size is the default, and `size=NAME` selects another.
    E.g. `sizes: {laptop: [training.steps=100]}`."""
    axes: Annotated[tuple[Axis, ...], _NONE] = ()
    """Axes that vary. Every combination of their values is a point.
    E.g. `axes: [{grid: {optimizer.lr: [1e-3, 3e-3]}}]`."""
    search: Annotated[Search | None, _NOTHING] = None
    """Ranges from which the points are drawn, instead of axes.
    E.g. `search: {method: sobol, points: 16, ranges: {optimizer.lr: {log_uniform: [1e-4, 1e-1]}}}`."""
    exclude: Annotated[tuple[Annotated[Exclusion, Read(_exclusion)], ...], _NONE] = ()
    """Points to leave out: values by key, and a `reason`. E.g. `exclude: [{parallelism.tp: 4, parallelism.pp: 4}]`."""
    seeds: Annotated[tuple[int, ...], Read(_seeds)] = ()
    """Seeds of every point, or their number. Without any, `experiment.seed` stays. E.g. `seeds: 3`."""
    halving: Annotated[Halving | None, _NOTHING] = None
    """Successive halving over the points. Without it, every point is trained to its end.
    E.g. `halving: {metric: validation_loss, rungs: [100, 300, 900], keep: 1/3}`."""
    pairs: Annotated[Pairs | None, _NOTHING] = None
    """Test of the study's point that is not the baseline, with an error rate. E.g. `pairs: {looks: [3, 5, 8]}`."""
    ladder: Annotated[Ladder | None, _NOTHING] = None
    """Sizes and lengths of every point, from which `compare` fits a scaling law. The axes then have at most two points,
    or there are none. E.g. `ladder: {multiples: [1/4, 1/2, 1], tokens_per_parameter: [10, 20, 40]}`."""
    baseline: Annotated[dict[str, tuple[str, ...]] | str | None, Read(_baseline)] = None
    """Point that the others are compared with: its label, a list's point by name, or values that only it has.
    E.g. `baseline: {optimizer.lr: 1e-3}`."""
    metrics: Annotated[dict[Annotated[Name, Check(_is_logged)], Direction], _NOTHING] = field(default_factory=dict)
    """Metrics to compare, with the better direction of each. E.g. `metrics: {validation_loss: min}`."""
    tune: str | None = None
    """Key over which each group of the comparison is tuned. E.g. `tune: optimizer.lr`."""

    def better(self, metric: str) -> Direction | None:
        """Better direction of a metric: the study's, or that of its name."""
        return self.metrics.get(metric) or usual_direction(metric)


@dataclass(frozen=True, kw_only=True)
class Study(StudyFile):
    """Study of a file, with an axis for each key of a grid."""

    path: Path
    """Path of the study file."""

    @property
    def name(self) -> str:
        """File name without extension; also the folder of its runs."""
        return self.path.stem
