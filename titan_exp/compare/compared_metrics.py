"""What runs are compared by: each metric is a name, a better direction, and how it is read from a run's rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from titan_exp.compare.run_record import Run
from titan_exp.compare.stats.moving_average import moving_average
from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.plan.gate.predicted import PredictedMetrics
from titan_exp.tracking.sinks.sink import REPORTED

Direction = Literal["min", "max"]

Reader = Callable[[Run, float], float | None]
"""Reads a metric of a run at a number of tokens; None where it is not known, NaN where the run has diverged."""


@dataclass(frozen=True)
class Metric:
    """One thing to compare."""

    name: str
    """As typed, and the key in metrics.jsonl where it is there."""
    title: str
    """For people."""
    unit: str
    """What it is counted in; empty for a ratio."""
    better: Direction | None
    """Which direction is better; None where neither is."""
    meaning: str
    """How it is measured, in a phrase."""
    read: Reader
    """Reads it from a run."""
    is_loss: bool = False
    """What was learned, as against what it cost."""
    needs_point: bool = True
    """It says nothing of a run that has not come to the tokens compared at."""


def target_metric(target: float) -> Metric:
    """Tokens until the smoothed training loss is at most `target`."""

    def read(run: Run, tokens: float) -> float | None:
        seen, losses = run.series("loss", tokens)
        values = [value if math.isfinite(value) else math.nan for value in losses]
        reached = (count for count, loss in zip(seen, moving_average(values), strict=True) if loss <= target)
        return next(reached, None)

    meaning = f"tokens until the smoothed training loss is {target:g} or less; empty where it never was"
    return Metric("tokens_to_target", f"tokens to loss {target:g}", "tokens", "min", meaning, read, needs_point=False)


def choose_metrics(names: Sequence[tuple[str, str | None]], runs: Sequence[Run], target: float | None) -> list[Metric]:
    """The metrics of these names, each with its own better direction where one is given; by default all that are known.

    Raises:
        UserError: a name is neither one of ours nor a key that a run has logged.
    """
    logged = {key for run in runs for row in run.rows[-200:] for key, value in row.items() if value is not None}
    added = [target_metric(target)] if target is not None else []
    if not names:
        reported = [_logged(name) for name in sorted(logged) if name.startswith(REPORTED)]
        built_in = [metric for metric in DEFAULT if metric.name != "best_validation_loss" or _worsens(runs)]
        return built_in + added + reported
    known = {metric.name: metric for metric in [*METRICS, *added]}
    unknown = [name for name, _ in names if name not in known and name not in logged]
    if unknown:
        every = [*known, *sorted(logged - known.keys() - {"step", "tokens", "attempt"})]
        remedy = did_you_mean(unknown[0], every) or f"There are {listed(every, 'and')}."
        raise UserError(f"metrics={unknown[0]}: no such metric was logged. {remedy}")
    return [_directed(known.get(name) or _logged(name), better) for name, better in names]


def final_loss(run: Run, tokens: float) -> float | None:
    """The mean training loss over the last rows that together make a fiftieth of the run up to `tokens`.

    One batch says little; the same smoothing as in `titan_exp.compare.output.plot.summary`.
    """
    _, losses = run.series("loss", tokens)
    tail = losses[-max(1, len(losses) // 50) :]
    return math.fsum(tail) / len(tail) if tail and all(map(math.isfinite, tail)) else math.nan if tail else None


def fraction_before(run: Run, tokens: float) -> float:
    """How much of what a run has done lies before `tokens`, from 0 to 1: by which its time is divided."""
    return min(1.0, tokens / run.tokens) if run.tokens else 1.0


def _directed(metric: Metric, better: str | None) -> Metric:
    if better is None:
        return metric
    if better not in ("min", "max"):
        raise UserError(f"{metric.name}: its better direction is min or max, not {better}.")
    return Metric(**{**metric.__dict__, "better": better})


def _logged(name: str) -> Metric:
    """Any other key of metrics.jsonl: its last value."""
    better: Direction | None = "min" if "loss" in name or "perplexity" in name else None
    return Metric(name, name.replace("_", " "), "", better, "last value", _last(name), is_loss=better == "min")


def _last(key: str) -> Reader:
    def read(run: Run, tokens: float) -> float | None:
        _, values = run.series(key, tokens)
        return values[-1] if values else None

    return read


def _best_validation(run: Run, tokens: float) -> float | None:
    values = [value for value in run.series("validation_loss", tokens)[1] if math.isfinite(value)]
    return min(values, default=None)


def _median(key: str) -> Reader:
    def read(run: Run, tokens: float) -> float | None:
        values = [value for value in run.series(key, tokens)[1] if math.isfinite(value)]
        return median(values) if values else None

    return read


def _memory(run: Run, tokens: float) -> float | None:
    return max(run.series("memory", tokens)[1], default=None)


def _of_predicted(measured: Reader, predicted: Callable[[PredictedMetrics], float | None]) -> Reader:
    """What a run has measured over what was predicted of it before it started."""

    def read(run: Run, tokens: float) -> float | None:
        found, expected = measured(run, tokens), predicted(run.predicted)
        return found / expected if found is not None and expected else None

    return read


def _hours(run: Run, tokens: float) -> float | None:
    return None if run.seconds is None else run.seconds / 3600 * fraction_before(run, tokens)


def _device_hours(run: Run, tokens: float) -> float | None:
    return None if run.device_seconds is None else run.device_seconds / 3600 * fraction_before(run, tokens)


def _worsens(runs: Sequence[Run]) -> bool:
    """Whether the best validation loss of some run is not its last, so that it says something more."""
    return any(_best_validation(run, math.inf) != _last("validation_loss")(run, math.inf) for run in runs)


METRICS = (
    Metric("loss", "loss", "nats", "min", "training loss, mean of the last fiftieth of the rows", final_loss, True),
    Metric("validation_loss", "validation loss", "nats", "min", "the last evaluation", _last("validation_loss"), True),
    Metric(
        "best_validation_loss", "best validation loss", "nats", "min", "the lowest evaluation", _best_validation, True
    ),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "tokens/s",
        "max",
        "median over rows, the first steps left out",
        _median("tokens_per_second"),
        needs_point=False,
    ),
    Metric(
        "tokens_per_second_per_device",
        "tokens/s per device",
        "tokens/s",
        "max",
        "the same over the number of devices",
        _median("tokens_per_second_per_device"),
        needs_point=False,
    ),
    Metric("mfu", "MFU", "", "max", "median over rows", _median("mfu"), needs_point=False),
    Metric("tflops", "TFLOP/s per device", "TFLOP/s", "max", "median over rows", _median("tflops"), needs_point=False),
    Metric("memory", "memory per device", "GiB", "min", "peak of rank 0", _memory, needs_point=False),
    Metric(
        "speed_of_predicted",
        "tokens/s of predicted",
        "",
        None,
        "tokens/s over what was predicted before the start",
        _of_predicted(_median("tokens_per_second"), lambda predicted: predicted.tokens_per_second),
        needs_point=False,
    ),
    Metric(
        "memory_of_predicted",
        "memory of predicted",
        "",
        None,
        "peak of rank 0 over the predicted one: of allocated tensors on a GPU, of the process on a CPU",
        _of_predicted(_memory, lambda predicted: predicted.memory),
        needs_point=False,
    ),
    Metric("time", "time", "h", "min", "wall clock of all starts, the share up to here", _hours),
    Metric("gpu_hours", "GPU-hours", "h", "min", "wall clock times processes; on CPU a process is one", _device_hours),
)
"""What can be compared; a study or `--metrics` chooses, and any other key of metrics.jsonl may be named as well."""

DEFAULT = tuple(metric for metric in METRICS if metric.name != "tflops")
