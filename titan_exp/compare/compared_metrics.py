"""Compared metrics: name, unit, better direction, reader.

Every other key of metrics.jsonl is a metric, too.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from titan_exp.compare.runs import ComparedRun
from titan_exp.compare.statistics import moving_average
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed, shown
from titan_exp.config.schema.identity_keys import flatten, has_effect, is_among
from titan_exp.config.study.study import Direction, usual_direction
from titan_exp.tracking.run_folder.metrics_jsonl import REPORTED, tail_mean
from titan_exp.tracking.run_folder.run import PredictedMetrics

WITH_PARENTS = "gpu_hours_with_parents"  # name of the metric that exists for continued runs
Reader = Callable[[ComparedRun, float], float | None]
"""Reads a metric of a run at a token budget; None if unknown, NaN if the run diverged."""


@dataclass(frozen=True)
class Metric:
    """Compared metric."""

    name: str  # command-line name, and key of metrics.jsonl if it is logged
    title: str
    unit: str  # unit; empty for a ratio
    better: Direction | None  # better direction; None if neither is better
    meaning: str  # definition, as a phrase
    read: Reader
    is_loss: bool = False  # true for a loss, False for a cost
    needs_point: bool = True  # True if the metric is unknown before a run has reached the token budget
    is_speed: bool = False  # true for a speed or a time; a group whose runs all failed or diverged has none


def target_metric(target: float) -> Metric:
    """Make the metric: tokens until the smoothed training loss is at most `target`."""

    def read(run: ComparedRun, tokens: float) -> float | None:
        seen, losses = run.series("loss", tokens)
        values = [value if math.isfinite(value) else math.nan for value in losses]
        return next((count for count, loss in zip(seen, moving_average(values), strict=True) if loss <= target), None)

    meaning = f"tokens until the smoothed training loss is {target:g} or less; empty if it never is"
    return Metric("tokens_to_target", f"tokens to loss {target:g}", "tokens", "min", meaning, read, needs_point=False)


def choose_metrics(
    names: Sequence[tuple[str, str | None]], runs: Sequence[ComparedRun], target: float | None
) -> list[Metric]:
    """Select metrics by name, each with an optional better direction; by default, DEFAULT and the reported ones. Raises
    UserError if no run has logged a name."""
    logged = {key for run in runs for row in run.rows[-200:] for key, number in row.items() if number is not None}
    added = [target_metric(target)] if target is not None else []
    if not names:
        reported = [_logged(name) for name in sorted(logged) if name.startswith(REPORTED)]
        last = _last("validation_loss")
        best_is_last = all(_best_validation(run, math.inf) == last(run, math.inf) for run in runs)
        left_out = {"best_validation_loss"} if best_is_last else set()
        left_out |= set() if any(run.begins for run in runs) else {WITH_PARENTS}
        return [*(metric for metric in DEFAULT if metric.name not in left_out), *added, *reported]
    known = METRIC_BY_NAME | {metric.name: metric for metric in added}
    unknown = [name for name, _ in names if name not in known and name not in logged]
    if unknown:
        every = [*known, *sorted(logged - known.keys() - {"step", "tokens", "attempt"})]
        suggestion = did_you_mean(unknown[0], every) or f"They log {listed(every, 'and')}."
        raise UserError(f"metrics={unknown[0]}: no run has logged this metric. {suggestion}")
    return [_directed(known.get(name) or _logged(name), better) for name, better in names]


def final_loss(run: ComparedRun, tokens: float) -> float | None:
    """Mean training loss over the last 2 % of the rows up to `tokens`, since a single batch is noisy."""
    return tail_mean(run.series("loss", tokens)[1])


def has_failed(run: ComparedRun, tokens: float) -> bool:
    """True if a run failed, or its loss up to `tokens` is not finite."""
    return run.state == "failed" or not math.isfinite(final_loss(run, tokens) or 0.0)


def _directed(metric: Metric, better: str | None) -> Metric:
    if better is None:
        return metric
    if better not in ("min", "max"):
        raise UserError(f"metric {metric.name}: the direction {better} must be min or max.")
    return replace(metric, better=better)


def _logged(name: str) -> Metric:
    better, unit = usual_direction(name), "nats" if name.startswith("validation_loss/") else ""
    return Metric(name, name.replace("_", " "), unit, better, "last value", _last(name), is_loss=better == "min")


def _last(key: str) -> Reader:
    return lambda run, tokens: next(reversed(run.series(key, tokens)[1]), None)


def _best_validation(run: ComparedRun, tokens: float) -> float | None:
    return min(filter(math.isfinite, run.series("validation_loss", tokens)[1]), default=None)


def own_values(run: ComparedRun, key: str, tokens: float) -> list[float]:
    """Values of a run's own rows, without its parent's, up to `tokens`; if it begins there, all its own rows."""
    up_to = tokens if tokens > run.begins else math.inf
    return run.series(key, up_to, above=run.begins or -1.0)[1]


def _median(key: str) -> Reader:
    def read(run: ComparedRun, tokens: float) -> float | None:
        values = [value for value in own_values(run, key, tokens) if math.isfinite(value)]
        return median(values) if values else None

    return read


def _memory(run: ComparedRun, tokens: float) -> float | None:
    return max(own_values(run, "memory", tokens), default=None)


def _hours(seconds_of: Callable[[ComparedRun], float | None]) -> Reader:
    """Reader of a time in hours, scaled to the run's own tokens; None if it is unknown, or the run begins later."""

    def read(run: ComparedRun, tokens: float) -> float | None:
        seconds, own = seconds_of(run), run.tokens - run.begins
        if seconds is None or (run.begins and tokens <= run.begins):
            return None
        return seconds / 3600 * (min(1.0, max(0.0, tokens - run.begins) / own) if own > 0 else 1.0)

    return read


_device_hours = _hours(lambda run: run.device_seconds)


def _device_hours_with_parents(run: ComparedRun, tokens: float) -> float | None:
    """GPU-hours of a run, plus those of its ancestors up to the tokens at which each was continued."""
    own = 0.0 if run.begins and tokens <= run.begins else _device_hours(run, tokens)
    if not run.begins or own is None:
        return own
    before = None if run.parent is None else _device_hours_with_parents(run.parent, min(tokens, run.begins))
    return None if before is None else before + own


def _loss(name: str, title: str, meaning: str, read: Reader) -> Metric:
    return Metric(name, title, "nats", "min", meaning, read, is_loss=True)


def _rate(name: str, title: str, unit: str, meaning: str) -> Metric:
    """Metric of each row: its median over rows, independent of the token budget."""
    return Metric(name, title, unit, "max", meaning, _median(name), needs_point=False, is_speed=True)


def _over_predicted(
    name: str, title: str, meaning: str, measured: Reader, predicted: Callable[[PredictedMetrics], float | None]
) -> Metric:
    def read(run: ComparedRun, tokens: float) -> float | None:
        value, expected = measured(run, tokens), predicted(run.predicted)
        return value / expected if value is not None and expected else None

    return Metric(name, title, "", None, meaning, read, needs_point=False, is_speed=name == "speed_of_predicted")


def _experts(name: str, title: str, better: Direction | None, meaning: str) -> Metric:
    """Metric of all layers with experts: its mean over the last rows, since a single batch is noisy."""
    key, meaning = f"experts/{name}", f"{meaning}; mean of the last fiftieth of the rows"
    return Metric(key, title, "", better, meaning, lambda run, tokens: tail_mean(run.series(key, tokens)[1]))


METRICS = (
    _loss("loss", "loss", "training loss, mean of the last fiftieth of the rows", final_loss),
    _loss("validation_loss", "validation loss", "the last evaluation", _last("validation_loss")),
    Metric(
        *("validation_bits_per_byte", "bits per byte", "bits", "min", "of the validation split, the last evaluation"),
        *(_last("validation_bits_per_byte"), True),
    ),
    _loss("best_validation_loss", "best validation loss", "the lowest evaluation", _best_validation),
    _rate("tokens_per_second", "tokens/s", "tokens/s", "median over rows, the first steps left out"),
    _rate("tokens_per_second_per_device", "tokens/s per device", "tokens/s", "the same over the number of devices"),
    _rate("mfu", "MFU", "", "median over rows"),
    _rate("tflops", "TFLOP/s per device", "TFLOP/s", "median over rows"),
    Metric("memory", "memory per device", "GiB", "min", "peak of rank 0", _memory, needs_point=False),
    _over_predicted(
        "speed_of_predicted",
        "tokens/s of predicted",
        "tokens/s over the prediction before the start",
        _median("tokens_per_second"),
        lambda prediction: prediction.tokens_per_second,
    ),
    _over_predicted(
        "memory_of_predicted",
        "memory of predicted",
        "peak of rank 0 over the prediction: of allocated tensors on a GPU, of the process on a CPU",
        _memory,
        lambda prediction: prediction.memory,
    ),
    Metric(
        "time",
        "time",
        "h",
        "min",
        "own wall clock of all starts, scaled to these tokens",
        _hours(lambda run: run.seconds),
        is_speed=True,
    ),
    Metric(
        "time_lost",
        "time lost",
        "h",
        "min",
        "waiting for others that failed, steps computed again and restarts, scaled to these tokens",
        _hours(lambda run: run.lost_seconds),
    ),
    Metric("gpu_hours", "GPU-hours", "h", "min", "own wall clock times processes; on CPU one each", _device_hours),
    Metric(
        WITH_PARENTS,
        "GPU-hours with parents",
        "h",
        "min",
        "the same and, of a continued run, those of its parents up to where it begins",
        _device_hours_with_parents,
    ),
    _experts("load_max", "expert load, max ÷ mean", "min", "tokens of the busiest expert over the mean, worst layer"),
    _experts("dead", "dead experts", "min", "experts without a token in a global batch, over all layers"),
    _experts("entropy", "entropy of load", "max", "1 is balanced, mean over layers"),
    _experts("bias_range", "router bias range", None, "max − min of the biases, largest of the layers"),
    _experts("balance_loss", "balance loss", None, "with its factor, sum over layers"),
    _experts("z_loss", "router z-loss", None, "with its factor, sum over layers"),
)
"""Built-in metrics; a study or `--metrics` may select others from metrics.jsonl."""

METRIC_BY_NAME = {metric.name: metric for metric in METRICS}
ON_REQUEST = ("tflops", "experts/bias_range", "experts/balance_loss", "experts/z_loss")
"""Built-in metrics that the table shows only if they are named."""

DEFAULT = tuple(metric for metric in METRICS if metric.name not in ON_REQUEST)


SEED = "experiment.seed"  # key of the seed; runs that differ only in it are repetitions
LABEL_OF_MODEL = "model.name"  # key of the label that replaces the model's shape keys if equal names mean equal shapes
GENERIC = {"name", "mode", "enabled", "recipe", "loss"}
"""Key names too generic to be short names; the group's name is used instead."""

RUNG_KEYS = ("training.stop_after", "checkpoint.continue_from")
"""Keys in which the rungs of one point differ under successive halving."""

ABSENT = "not there"  # value of a key that is missing from a configuration written by an older version or read from W&B


@dataclass(frozen=True)
class DifferingKeys:
    """Keys that distinguish runs."""

    keys: tuple[str, ...]  # full names of the columns, in the order of the configuration
    short: Mapping[str, str]  # short name of each key, unique among them
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys folded into a column, by column
    names: Sequence[Mapping[str, Any]] = ()  # values of the columns that stand for other keys, by configuration

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All differing keys, including folded ones."""
        return tuple(key for column in self.keys for key in (self.stands_for.get(column) or (column,)))

    def label(self, values: Mapping[str, Any], keys: Iterable[str] | None = None) -> str:
        """Short names and values of some or all keys: `lr=0.003 tp=2`."""
        shown = self.keys if keys is None else keys
        return " ".join(f"{self.short[key]}={value_text(values.get(key))}" for key in shown)


def differing_keys(
    configs: Sequence[Mapping[str, Any]],
    lists: Mapping[str, Sequence[str]] | None = None,
    choices: Sequence[Mapping[str, str]] = (),
    *,
    left_out: Sequence[str] = (),
) -> DifferingKeys:
    """Keys in which nested configurations differ, except the seed and keys that do not affect results.

    Keys that a study's named list sets together become one column with the list's name: `lists` has their keys by list,
    `choices` the chosen name by list for each configuration. If other axes also vary keys of a list, these keep their
    columns. Likewise, a model's name replaces its shape keys, and a group's choice, such as an optimizer, replaces keys
    that other choices lack.
    """
    flat = [flatten(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for values in flat for key in values)
        if key not in (SEED, *left_out)
        and has_effect(key)
        and len({_hashable(values.get(key, ABSENT)) for values in flat}) > 1
    ]
    keys = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]  # an empty mapping of them
    folds = [
        (column, [key for key in keys if is_among(key, together)], [chosen.get(column) for chosen in choices])
        for column, together in (lists or {}).items()
    ]
    shape = [key for key in keys if key.startswith("model.")]
    folds.append((LABEL_OF_MODEL, shape, [values.get(LABEL_OF_MODEL) for values in flat]))
    for choice in (key for key in keys if key.rpartition(".")[2] in GENERIC and key != LABEL_OF_MODEL):
        group = choice.rpartition(".")[0]
        lacking = [key for key in keys if key.startswith(f"{group}.") and any(key not in values for values in flat)]
        folds.append((choice, [choice, *lacking], [values.get(choice) for values in flat]))
    stands_for: dict[str, tuple[str, ...]] = {}
    named: list[dict[str, Any]] = [{} for _ in flat]
    for column, together, names in folds:
        folded = [key for key in together if key in keys]
        if column != LABEL_OF_MODEL:
            folded = [key for key in folded if _determines(names, [key], flat)]
        if len(folded) < (3 if column == LABEL_OF_MODEL else 2) or not _determines(names, folded, flat):
            continue
        first = keys.index(folded[0])
        keys = [*keys[:first], column, *(key for key in keys[first:] if key not in folded)]
        stands_for[column] = tuple(folded)
        for values, name in zip(named, names, strict=True):
            values[column] = name
    return DifferingKeys(tuple(keys), _short_names(keys), stands_for, named)


def value_text(value: Any) -> str:
    """Format a value as typed on the command line; numbers have ten digits."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(value_text, value))}]"
    return f"{value:.10g}" if isinstance(value, float) else shown(value)


def _determines(names: Sequence[Any], keys: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> bool:
    """True if all configurations have a name, and equal names mean equal values of the keys."""
    values = [tuple(_hashable(config.get(key, ABSENT)) for key in keys) for config in flat]
    return None not in names and len(set(zip(names, values, strict=True))) == len(set(names))


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    wanted = {}
    for key in keys:
        group, _, last = key.rpartition(".")
        wanted[key] = group.rpartition(".")[2] if last in GENERIC and group else last
    while clashes := [name for name, count in Counter(wanted.values()).items() if count > 1]:
        for key in [key for key in keys if wanted[key] in clashes]:
            parts = wanted[key].count(".") + 2
            longer = ".".join(key.split(".")[-parts:])
            if longer == wanted[key]:
                return {key: key for key in keys}
            wanted[key] = longer
    return wanted


def _hashable(value: Any) -> Hashable:
    # 1 == 1.0 == True in Python, but True differs from 1 in a configuration.
    if isinstance(value, bool):
        return ("bool", value)
    return value if isinstance(value, int | float | str) or value is None else repr(value)
