"""Mixture interleaving: exact shares in every stretch of rows, with random access."""

import pytest

from titan_exp.data.token_store.mixture import Mixture

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
    shares = [max(weight / sum(weights), 1 / 2**16) for weight in weights]
    for rows in (1, 7, 64, 1000, 65_536, 10**9 + 7):
        for count, share in zip(mixture.counts(rows), shares, strict=True):
            assert abs(count - rows * share) <= len(weights) + rows * len(weights) / 2**16


def test_representable_shares_are_exact():
    assert Mixture([0.3, 0.7]).counts(10_000) == [3000, 7000]
    assert Mixture([1, 2, 3]).period == 6
    assert Mixture([1.0, 1.0]).counts(7) == [4, 3]


@pytest.mark.parametrize("weights", [[1.0, 1e-9], [1e-6, 1e-6, 1.0], [10**9, 1]], ids=str)
def test_a_source_with_a_tiny_share_comes(weights: list[float]):
    mixture = Mixture(weights)
    assert min(mixture.counts(mixture.period)) == 1
    assert mixture.period <= 65_540
    rare = [row for row in range(mixture.period) if weights[mixture[row][0]] < max(weights)]
    assert len(rare) == len(weights) - 1


def test_random_access_to_any_row():
    assert Mixture([3, 7])[10**15][1] in (3 * 10**14, 7 * 10**14)
