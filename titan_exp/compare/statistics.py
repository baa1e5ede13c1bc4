"""What repetitions with other seeds let us say: intervals by Student's t, paired differences, Holm's correction.

Every number has its n; where one seed alone was run, no interval is made up.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
    mean, error = _mean_and_error(values)
    if error is None:
        return Estimate(mean, None, None, len(values))
    half = _quantile(len(values) - 1) * error
    return Estimate(mean, mean - half, mean + half, len(values))


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
        return Delta(_mean(values.values()) - _mean(baseline.values()), None, None, 1, "single")
    differences = [values[seed] - baseline[seed] for seed in common]
    mean, error = _mean_and_error(differences)
    if error is None:
        return Delta(mean, None, None, 1, "single")
    return _delta(mean, error, len(common) - 1, len(common), "paired")


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


def _unpaired(values: Sequence[float], baseline: Sequence[float]) -> Delta:
    (mean, error), (other, other_error) = _mean_and_error(values), _mean_and_error(baseline)
    assert error is not None
    assert other_error is not None
    parts = (error**2, len(values) - 1), (other_error**2, len(baseline) - 1)
    total = sum(variance for variance, _ in parts)
    # Welch and Satterthwaite's degrees of freedom.
    freedom = total**2 / sum(variance**2 / free for variance, free in parts) if total else 1.0
    return _delta(mean - other, math.sqrt(total), freedom, min(len(values), len(baseline)), "unpaired")


def _delta(mean: float, error: float, freedom: float, n: int, pairing: Pairing) -> Delta:
    from scipy.special import stdtr

    half = _quantile(freedom) * error
    certain = 1.0 if mean == 0 else 0.0  # all differences are one number
    p = float(2 * stdtr(freedom, -abs(mean / error))) if error else certain
    return Delta(mean, mean - half, mean + half, n, pairing, p)


def _quantile(freedom: float) -> float:
    """Of Student's t, such that LEVEL lies within plus and minus it."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, which one value alone does not have."""
    mean, n = _mean(values), len(values)
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
