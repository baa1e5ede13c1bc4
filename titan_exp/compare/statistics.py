"""Statistics: paired and unpaired t-tests, and a moving average."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

LEVEL = 0.95

Pairing = Literal["paired", "unpaired", "single"]
"""Pairing: `paired` compares equal seeds, `unpaired` compares means (Welch), `single` one number with another."""


@dataclass(frozen=True)
class Estimate:
    """Mean of a metric over the seeds with a known value."""

    mean: float
    low: float | None
    """Bounds of the confidence interval; None with one seed."""
    high: float | None
    n: int


@dataclass(frozen=True)
class Delta:
    """Difference from the baseline: row minus baseline."""

    difference: float
    """Difference of means; over common seeds if paired."""
    low: float | None
    """Bounds of the confidence interval, not Holm-corrected; None without an interval."""
    high: float | None
    n: int
    """Number of pairs; the smaller number of seeds if unpaired."""
    pairing: Pairing
    p: float | None = None
    """Two-sided p-value; None without an interval."""
    p_holm: float | None = None
    """Holm-corrected p-value over all comparisons of this metric (Holm 1979)."""

    @property
    def is_distinguishable(self) -> bool | None:
        """True if it differs from 0 after Holm correction; None without an interval."""
        p = self.p if self.p_holm is None else self.p_holm
        return None if p is None else p < 1 - LEVEL

    @property
    def holds_zero(self) -> bool | None:
        """True if the interval contains 0; None without one."""
        return None if self.low is None or self.high is None else self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean of values with its confidence interval; None without values."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    if _is_constant(values):
        return Estimate(mean, mean, mean, len(values))
    interval = _student("ttest_1samp", values, 0.0).confidence_interval(LEVEL)
    return Estimate(mean, float(interval.low), float(interval.high), len(values))


def difference(values: Mapping[object, float], baseline: Mapping[object, float]) -> Delta | None:
    """Difference between values and the baseline's, both by seed; None if either is empty.

    Common seeds are paired, which cancels the effect of initial weights and data order; other seeds are left out. With
    fewer than two common seeds and at least two on both sides, means are compared (Welch 1947).
    """
    common = [seed for seed in values if seed in baseline]
    if len(common) < 2 and len(values) >= 2 and len(baseline) >= 2:
        return _unpaired(list(values.values()), list(baseline.values()))
    if not common:
        if not values or not baseline:
            return None
        return Delta(fmean(values.values()) - fmean(baseline.values()), None, None, 1, "single")
    return _paired([values[seed] - baseline[seed] for seed in common])


def holm(deltas: Sequence[Delta | None]) -> list[Delta | None]:
    """Set `p_holm` by Holm's step-down correction: the smallest of m p-values times m, the next times m - 1, and so
    on."""
    known = sorted((delta.p, index) for index, delta in enumerate(deltas) if delta is not None and delta.p is not None)
    found, largest = list(deltas), 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        delta = deltas[index]
        assert delta is not None
        found[index] = replace(delta, p_holm=largest)
    return found


def _paired(differences: Sequence[float]) -> Delta:
    mean, n = fmean(differences), len(differences)
    if n == 1:
        return Delta(mean, None, None, 1, "single")
    if _is_constant(differences):
        return _certain(mean, n, "paired")
    # Equivalent to scipy's paired t-test.
    return _delta(mean, _student("ttest_1samp", differences, 0.0), n, "paired")


def _unpaired(values: Sequence[float], baseline: Sequence[float]) -> Delta:
    mean, n = fmean(values) - fmean(baseline), min(len(values), len(baseline))
    if _is_constant(values) and _is_constant(baseline):
        return _certain(mean, n, "unpaired")
    return _delta(mean, _student("ttest_ind", values, baseline, equal_var=False), n, "unpaired")


def _student(name: str, *arguments: Any, **options: Any) -> Any:
    from scipy import stats

    with warnings.catch_warnings():
        # Values that differ only by rounding correctly give a narrow interval.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        return getattr(stats, name)(*arguments, **options)


def _delta(mean: float, test: Any, n: int, pairing: Pairing) -> Delta:
    interval = test.confidence_interval(LEVEL)
    return Delta(mean, float(interval.low), float(interval.high), n, pairing, float(test.pvalue))


def _certain(mean: float, n: int, pairing: Pairing) -> Delta:
    """Delta of constant values, for which scipy would divide by zero."""
    return Delta(mean, mean, mean, n, pairing, 1.0 if mean == 0 else 0.0)


def _is_constant(values: Sequence[float]) -> bool:
    return min(values) == max(values)


def moving_average(values: list[float]) -> list[float]:
    """Centred moving average over about 4 % of the values.

    At the end the window is cut off, so that the last value is the mean of the last 2 %. At the beginning, where a loss
    falls fast, a line is fitted to the cut-off window. Non-finite values become NaN and do not count in their
    neighbours' averages.
    """
    loss = np.array(values)
    known = np.isfinite(loss)
    index, half = np.arange(len(loss)), max(1, len(loss) // 50)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, loss, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    last = np.minimum(index + half + 1, len(loss))
    first = np.maximum(index - half + (index + half >= len(loss)), 0)
    mean = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    for place in range(min(half, len(loss) - half)):
        window = index[: place + half + 1][known[: place + half + 1]]
        if len(window) > 1:
            mean[place] = np.polyfit(window - place, loss[window], 1)[1]
    return np.where(known, mean, np.nan).tolist()
