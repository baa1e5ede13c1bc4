"""Intervals and verdicts against scipy's tests and simulated data with a known truth."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from titan_exp.compare.statistics import Delta, difference, estimate, holm

ROUNDS = 600


def by_seed(values: np.ndarray | list[float]) -> dict[object, float]:
    return {seed: float(value) for seed, value in enumerate(values)}


def test_paired_differences_equal_scipy():
    draw = np.random.default_rng(0)
    for n in (2, 3, 7):
        one, two = draw.normal(3, 1, n), draw.normal(3.1, 2, n)
        expected = stats.ttest_rel(one, two)
        interval = expected.confidence_interval(0.95)
        found = difference(by_seed(one), by_seed(two))
        assert found is not None
        assert (found.pairing, found.n) == ("paired", n)
        assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, expected.pvalue))


def test_unpaired_differences_equal_scipy():
    draw = np.random.default_rng(1)
    one, two = draw.normal(3, 1, 4), draw.normal(3.1, 3, 6)
    expected: Any = stats.ttest_ind(one, two, equal_var=False)
    interval = expected.confidence_interval(0.95)
    found = difference(by_seed(one), {f"other {seed}": value for seed, value in by_seed(two).items()})
    assert found is not None
    assert (found.pairing, found.n) == ("unpaired", 4)
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, expected.pvalue))


def test_estimate_equals_scipy():
    values = [3.0, 3.5, 3.1, 2.9]
    found = estimate(values)
    assert found is not None
    expected = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert estimate([]) is None
    alone = estimate([3.0])
    assert alone is not None
    assert (alone.mean, alone.low, alone.high, alone.n) == (3.0, None, None, 1)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_coverage_of_intervals(seeds: int):
    draw = np.random.default_rng(seeds)
    truth, covered = 0.02, 0
    for _ in range(ROUNDS):
        shared = draw.normal(0, 0.5, seeds)  # what a seed does to both, far more than what differs
        baseline = 3 + shared + draw.normal(0, 0.01, seeds)
        values = 3 + truth + shared + draw.normal(0, 0.01, seeds)
        found = difference(by_seed(values), by_seed(baseline))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    # Three standard deviations of a proportion over so many rounds.
    assert covered / ROUNDS == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / ROUNDS))


def test_pairing_is_more_powerful():
    draw = np.random.default_rng(9)
    shared = draw.normal(0, 0.5, 4)
    one, two = by_seed(3.05 + shared + draw.normal(0, 0.005, 4)), by_seed(3 + shared + draw.normal(0, 0.005, 4))
    paired = difference(one, two)
    means = difference(one, {seed + 100: value for seed, value in two.items()})  # type: ignore[operator]
    assert paired is not None
    assert means is not None
    assert paired.is_distinguishable
    assert not means.is_distinguishable
    assert means.holds_zero


def test_holm_controls_false_positives():
    draw = np.random.default_rng(4)
    alone = corrected = 0
    for _ in range(ROUNDS // 2):
        baseline = by_seed(draw.normal(3, 0.1, 4))
        deltas = [difference(by_seed(draw.normal(3, 0.1, 4)), baseline) for _ in range(8)]
        known = [delta for delta in holm(deltas) if delta is not None]
        alone += any(delta.p is not None and delta.p < 0.05 for delta in known)
        corrected += any(delta.is_distinguishable for delta in known)
    assert alone / (ROUNDS // 2) > 0.15, "eight comparisons, and none is seen: this test shows nothing"
    assert corrected / (ROUNDS // 2) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / (ROUNDS // 2))


def test_holm_as_published():
    def delta(p: float | None) -> Delta:
        return Delta(1.0, 0.0, 2.0, 3, "paired", p)

    found = holm([delta(0.04), None, delta(0.01), delta(None), delta(0.03), delta(0.005)])
    corrected = [None if test is None else test.p_holm for test in found]
    assert corrected == pytest.approx([0.06, None, 0.03, None, 0.06, 0.02])


def test_one_seed_gives_no_interval():
    found = difference({0: 3.0}, {0: 3.5, 1: 3.6, 2: 3.7})
    assert found == Delta(-0.5, None, None, 1, "single")
    assert (found and found.is_distinguishable, found and found.holds_zero) == (None, None)
    assert difference({5: 3.0}, {0: 3.5}) == Delta(-0.5, None, None, 1, "single")
    assert difference({}, {0: 3.5}) is None
    assert difference({0: 3.5}, {}) is None


def test_seeds_that_one_side_lacks_are_left_out():
    found = difference({0: 1.0, 1: 2.0, 2: 99.0}, {1: 1.5, 0: 0.0, 7: -50.0})
    assert found is not None
    assert (found.difference, found.n, found.pairing) == (0.75, 2, "paired")


def test_constant_differences():
    same = difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert same is not None
    assert (same.low, same.high, same.p, same.is_distinguishable) == (0.0, 0.0, 1.0, False)
    shifted = difference({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0})
    assert shifted is not None
    assert (shifted.low, shifted.high, shifted.is_distinguishable) == (1.0, 1.0, True)


def test_differences_of_rounding_size():
    found = difference({0: 3.1, 1: 4.1, 2: 5.1}, {0: 2.1, 1: 3.1, 2: 4.1})
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1.0, 1.0))
    assert found.is_distinguishable
    alone = estimate([0.3, 0.1 + 0.2, 0.3])
    assert alone is not None
    assert (alone.low, alone.high) == pytest.approx((0.3, 0.3))
