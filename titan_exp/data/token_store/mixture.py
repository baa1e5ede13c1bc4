"""Which source each row of a mixture comes from: a fixed interleaving that keeps its shares in every stretch of rows.

A period of P rows holds exactly its quota of each source, each source's rows spread evenly over it. So how many rows
of a source come before any row is known at once, in every layout the same, and no row is drawn at random.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_LONGEST_PERIOD = 2**16


class Mixture:
    """Rows divided among sources by `weights`, in any unit. A share that no period of at most 65,536 rows gives exactly
    is rounded to a multiple of 1/65,536, and up to one row a period at least."""

    def __init__(self, weights: Sequence[float]) -> None:
        quotas = _quotas(weights)
        self.period = sum(quotas)
        """Rows after which the interleaving repeats."""
        self.quotas = quotas
        """Rows of each source in a period."""
        places = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        order = np.argsort(places, kind="stable")
        self._sources = np.repeat(np.arange(len(quotas)), quotas)[order]
        self._numbers = np.concatenate([np.arange(quota) for quota in quotas])[order]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """The source of row `row`, and how many rows of that source come before it."""
        period, place = divmod(row, self.period)
        source = int(self._sources[place])
        return source, period * self.quotas[source] + int(self._numbers[place])

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows each source gives."""
        periods, rest = divmod(rows, self.period)
        begun = np.bincount(self._sources[:rest], minlength=len(self.quotas))
        return [periods * quota + int(more) for quota, more in zip(self.quotas, begun, strict=True)]


def _quotas(weights: Sequence[float]) -> list[int]:
    """Rows of each source in the shortest period that gives the shares of `weights`, read as decimals, or nearly so."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PERIOD:
        return [int(share * period) for share in shares]
    return [max(1, round(share * _LONGEST_PERIOD)) for share in shares]
