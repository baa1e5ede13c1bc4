"""Number formats of metrics, the same in every output."""

import math

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.stats.ttest import Delta, Estimate
from titan_exp.tracking.number_format import format_count, format_duration

MINUS = "\N{MINUS SIGN}"
MISSING = "\N{EM DASH}"
"""Text for an unknown number."""


def value(metric: Metric, number: float | None) -> str:
    """Format a metric's value without its unit."""
    if number is None:
        return MISSING
    if not math.isfinite(number):
        return "diverged" if metric.is_loss else "not finite"
    if metric.name == "time":
        return format_duration(3600 * number)
    if metric.name == "mfu" or metric.name.endswith("_of_predicted"):
        return f"{100 * number:.1f} %"
    if metric.unit in ("tokens/s", "tokens"):
        return format_count(number)
    return f"{number:.4f}" if metric.unit == "nats" else f"{number:.4g}" if metric.unit != "h" else f"{number:.3g}"


def with_interval(metric: Metric, estimate: Estimate | None) -> str:
    """Format a mean; a loss with the half-width of its confidence interval, if known."""
    if estimate is None:
        return MISSING
    text = value(metric, estimate.mean)
    if estimate.high is None or not metric.is_loss:
        return text
    return f"{text} ± {_magnitude(metric, estimate.high - estimate.mean)}"


def signed(metric: Metric, number: float) -> str:
    """Format a difference with its sign."""
    sign = MINUS if number < 0 else "+" if number > 0 else "±"
    return f"{sign}{_magnitude(metric, abs(number))}"


def percent(ratio: float) -> str:
    """Format a ratio as a relative change: +3.1 %."""
    number = 100 * (ratio - 1)
    text = f"{abs(number):.0f}" if abs(number) >= 10 else f"{abs(number):.1f}"
    sign = "±" if float(text) == 0 else MINUS if number < 0 else "+"
    return f"{sign}{text} %"


def change(metric: Metric, delta: Delta | None, baseline: float | None) -> str:
    """Format a difference to the baseline: losses with their interval, costs in per cent."""
    if delta is None:
        return MISSING
    if not metric.is_loss and baseline:
        return percent(1 + delta.difference / baseline)
    return signed(metric, delta.difference) + interval(metric, delta)


def interval(metric: Metric, delta: Delta) -> str:
    """Format the confidence interval of a difference in brackets; empty if unknown."""
    if delta.low is None or delta.high is None:
        return ""
    return f" [{signed(metric, delta.low)}, {signed(metric, delta.high)}]"


def _magnitude(metric: Metric, number: float) -> str:
    if metric.unit == "nats":
        return f"{number:.4f}" if number >= 0.001 or number == 0 else f"{number:.1e}"
    return value(metric, number)
