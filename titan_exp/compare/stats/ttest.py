"""What repetitions with other seeds let us say: intervals by Student's t, paired differences, Holm's correction.

The tests are scipy's, imported where they are used (0.6 s). Every number has its n; where one seed alone was run, no
interval is made up.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

LEVEL = 0.95
"""Of confidence intervals."""

Pairing = Literal["paired", "unpaired", "single"]
"""Same seed against same seed; means against each other (Welch); one number against one."""


@dataclass(frozen=True)
class Estimate:
    """The mean of a metric over seeds."""

    mean: float
    """Over the seeds where it is known."""
    low: float | None
    """Lower end of its confidence interval; None with one seed."""
    high: float | None
    """Upper end."""
    n: int
    """Seeds."""


@dataclass(frozen=True)
class Delta:
    """A difference to the baseline, row minus baseline."""

    difference: float
    """Of means; over common seeds where they are paired."""
    low: float | None
    """Lower end of its confidence interval, not corrected for several comparisons; None where none is known."""
    high: float | None
    """Upper end."""
    n: int
    """Pairs; the smaller number of seeds where they are not paired."""
    pairing: Pairing
    """How it was taken."""
    p: float | None = None
    """Of a difference at least as large where there is none, two-sided; None where no interval is known."""
    p_holm: float | None = None
    """The same, corrected for all comparisons of this metric (Holm 1979)."""

    @property
    def is_distinguishable(self) -> bool | None:
        """Whether it differs from 0 with all comparisons counted; None where no interval is known."""
        p = self.p if self.p_holm is None else self.p_holm
        return None if p is None else p < 1 - LEVEL

    @property
    def holds_zero(self) -> bool | None:
        """Whether the interval holds 0; None where none is known."""
        return None if self.low is None or self.high is None else self.low <= 0 <= self.high


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of values with its interval; None where there are none."""
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
    """The difference of values to those of the baseline, both by seed; None where either has none.

    Common seeds are paired, for the same seed means the same initial weights and the same order of data, and what
    they share cancels. Seeds that only one side has are left out then. Where fewer than two are common and both sides
    have two or more, means are compared instead (Welch 1947).
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
    """The same differences with `p_holm`: the smallest of m values is multiplied by m, the next by m - 1, and so on."""
    known = sorted((delta.p, place) for place, delta in enumerate(deltas) if delta is not None and delta.p is not None)
    found, largest = list(deltas), 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        delta = deltas[place]
        assert delta is not None
        found[place] = replace(delta, p_holm=largest)
    return found


def _paired(differences: Sequence[float]) -> Delta:
    mean, n = fmean(differences), len(differences)
    if n == 1:
        return Delta(mean, None, None, 1, "single")
    if _is_constant(differences):
        return _certain(mean, n, "paired")
    # Of the differences themselves: scipy's paired test is this one.
    return _delta(mean, _student("ttest_1samp", differences, 0.0), n, "paired")


def _unpaired(values: Sequence[float], baseline: Sequence[float]) -> Delta:
    mean, n = fmean(values) - fmean(baseline), min(len(values), len(baseline))
    if _is_constant(values) and _is_constant(baseline):
        return _certain(mean, n, "unpaired")
    return _delta(mean, _student("ttest_ind", values, baseline, equal_var=False), n, "unpaired")


def _student(name: str, *arguments: Any, **options: Any) -> Any:
    """One of scipy's t-tests."""
    from scipy import stats

    with warnings.catch_warnings():
        # Of numbers that agree but for rounding: their interval is as narrow as rounding, which is what it should say.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        return getattr(stats, name)(*arguments, **options)


def _delta(mean: float, test: Any, n: int, pairing: Pairing) -> Delta:
    interval = test.confidence_interval(LEVEL)
    return Delta(mean, float(interval.low), float(interval.high), n, pairing, float(test.pvalue))


def _certain(mean: float, n: int, pairing: Pairing) -> Delta:
    """Where every repetition says the same there is nothing to estimate, and scipy would divide by zero."""
    return Delta(mean, mean, mean, n, pairing, 1.0 if mean == 0 else 0.0)


def _is_constant(values: Sequence[float]) -> bool:
    return min(values) == max(values)
