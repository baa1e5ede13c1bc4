"""Data mixture: periodic interleaving of sources that keeps their shares in every range of rows.

A period of P rows contains each source's quota exactly, evenly spread. The number of a source's rows before any row has
a closed form, independent of the layout.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_MAX_PERIOD = 2**16


class Mixture:
    """Assignment of rows to sources by `weights`, in any unit. Shares not representable by a period of at most 65,536
    rows are rounded to multiples of 1/65,536, and up to one row per period."""

    def __init__(self, weights: Sequence[float]) -> None:
        quotas = _quotas(weights)
        self.period = sum(quotas)
        """Number of rows after which the interleaving repeats."""
        self.quotas = quotas
        """Number of rows of each source in a period."""
        times = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        order = np.argsort(times, kind="stable")
        self._sources = np.repeat(np.arange(len(quotas)), quotas)[order]
        self._numbers = np.concatenate([np.arange(quota) for quota in quotas])[order]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Source of a row, and the number of that source's rows before it."""
        period, offset = divmod(row, self.period)
        source = int(self._sources[offset])
        return source, period * self.quotas[source] + int(self._numbers[offset])

    def counts(self, rows: int) -> list[int]:
        """Number of rows of each source among the first `rows` rows."""
        periods, rest = divmod(rows, self.period)
        partial = np.bincount(self._sources[:rest], minlength=len(self.quotas))
        return [periods * quota + int(count) for quota, count in zip(self.quotas, partial, strict=True)]


def _quotas(weights: Sequence[float]) -> list[int]:
    """Rows of each source in the shortest period for the shares of `weights`, read as decimals."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return [int(share * period) for share in shares]
    return [max(1, round(share * _MAX_PERIOD)) for share in shares]
