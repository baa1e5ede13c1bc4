"""Mixture interleaving: exact shares in every stretch of rows, with random access."""

import random
from fractions import Fraction

import numpy as np
import pytest

from titan_exp.data.token_store import ROUNDED_PERIOD, Mixture

WEIGHTS = [[1.0], [3, 7], [0.3, 0.7], [1, 1, 1], [0.5, 0.25, 0.125, 0.125], [1e-9, 1.0], [123457, 891011, 17]]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_row_of_a_source_is_counted_once(weights: list[float]):
    mixture = Mixture(weights)
    begin = 3 * mixture.period - 100 if mixture.period > 100 else 0
    counts = mixture.counts(begin)
    for row in range(begin, begin + 500):
        source, number = mixture[row]
        assert number == counts[source]
        counts[source] += 1
        assert mixture.counts(row + 1) == counts


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_shares_hold_in_every_stretch_of_rows(weights: list[float]):
    mixture = Mixture(weights)
    total = sum(map(Fraction, map(str, weights)))
    for rows in (1, 7, 64, 1000, 65_536, 10**9 + 7):
        for count, weight in zip(mixture.counts(rows), weights, strict=True):
            assert abs(count - rows * Fraction(str(weight)) / total) <= 1


def test_representable_shares_are_exact():
    assert Mixture([0.3, 0.7]).counts(10_000) == [3000, 7000]
    assert Mixture([1, 2, 3]).period == 6
    assert Mixture([1.0, 1.0]).counts(7) == [4, 3]


@pytest.mark.parametrize("weights", [[1.0, 1e-9], [1e-6, 1e-6, 1.0], [10**9, 1]], ids=str)
def test_a_source_with_a_tiny_share_comes(weights: list[float]):
    mixture = Mixture(weights)
    assert min(mixture.counts(mixture.period)) == 1
    middle = mixture.period // 2  # where the one row of a rare source lies
    rare = [row for row in range(middle - 3, middle + 3) if weights[mixture[row][0]] < max(weights)]
    assert len(rare) == len(weights) - 1
    rounded = Mixture(weights, rounded=True)
    assert min(rounded.counts(65_540)) == 1


@pytest.mark.parametrize("sizes", [[123_457, 891_011, 17], [70_001, 65_537], [10**7 + 9 * n for n in range(10)]])
def test_sources_mixed_by_size_end_their_epochs_together(sizes: list[int]):
    """Rounded shares left the smallest of 50 stores 1.5 % of its windows off."""
    assert Mixture(sizes).counts(sum(sizes)) == sizes
    assert Mixture(sizes).counts(3 * sum(sizes)) == [3 * size for size in sizes]


@pytest.mark.parametrize("weights", [*WEIGHTS, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], ids=str)
def test_the_order_is_that_of_earlier_versions_where_shares_are_not_rounded(weights: list[float]):
    mixture = Mixture(weights, rounded=True)
    times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in mixture.quotas])
    sources = np.repeat(np.arange(len(weights)), mixture.quotas)[np.argsort(times, kind="stable")]
    rows = range(mixture.period) if mixture.period < 1000 else random.Random(0).sample(range(mixture.period), 1000)
    assert [mixture[row][0] for row in rows] == sources[list(rows)].tolist()
    if Mixture(weights).period <= ROUNDED_PERIOD:
        assert Mixture(weights).quotas == mixture.quotas


def test_random_access_to_any_row():
    assert Mixture([3, 7])[10**15][1] in (3 * 10**14, 7 * 10**14)
