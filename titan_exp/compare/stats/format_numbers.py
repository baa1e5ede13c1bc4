"""Numbers as people read them: the same few digits in every output."""

import math

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.stats.ttest import Delta, Estimate

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EM DASH}"
"""Where there is no number."""


def short_count(number: float) -> str:
    """A count in at most six characters: 950, 30.72k, 1.25M."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale * 0.99995:
            return f"{number / scale:.4g}{letter}"
    return f"{number:.4g}"


def value(metric: Metric, number: float | None) -> str:
    """A value of a metric, without its unit."""
    if number is None:
        return NOTHING
    if not math.isfinite(number):
        return "diverged" if metric.is_loss else "not finite"
    if metric.name == "time":
        return duration(3600 * number)
    if metric.name == "mfu" or metric.name.endswith("_of_predicted"):
        return f"{100 * number:.1f} %"
    if metric.unit in ("tokens/s", "tokens"):
        return short_count(number)
    return f"{number:.4f}" if metric.unit == "nats" else f"{number:.4g}" if metric.unit != "h" else f"{number:.3g}"


def with_interval(metric: Metric, estimate: Estimate | None) -> str:
    """A mean, and half the width of its interval where one is known."""
    if estimate is None:
        return NOTHING
    text = value(metric, estimate.mean)
    if estimate.high is None or not metric.is_loss:
        return text
    return f"{text} ± {_magnitude(metric, estimate.high - estimate.mean)}"


def signed(metric: Metric, number: float) -> str:
    """A difference with its sign."""
    sign = MINUS if number < 0 else "+" if number > 0 else "±"
    return f"{sign}{_magnitude(metric, abs(number))}"


def percent(ratio: float) -> str:
    """A relative change: +3.1 %."""
    number = 100 * (ratio - 1)
    text = f"{abs(number):.0f}" if abs(number) >= 10 else f"{abs(number):.1f}"
    sign = "±" if float(text) == 0 else MINUS if number < 0 else "+"
    return f"{sign}{text} %"


def change(metric: Metric, delta: Delta | None, baseline: float | None) -> str:
    """A difference to the baseline: with its interval for what was learned, in per cent for what it cost."""
    if delta is None:
        return NOTHING
    if not metric.is_loss and baseline:
        return percent(1 + delta.difference / baseline)
    text = signed(metric, delta.difference)
    if delta.low is None or delta.high is None:
        return text
    return f"{text} [{signed(metric, delta.low)}, {signed(metric, delta.high)}]"


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, the two largest parts."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{seconds:.3g}s"


def _magnitude(metric: Metric, number: float) -> str:
    if metric.unit == "nats":
        return f"{number:.4f}" if number >= 0.001 or number == 0 else f"{number:.1e}"
    return value(metric, number)
