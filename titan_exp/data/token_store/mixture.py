"""Data mixture: interleaving of sources that keeps their shares in every range of rows.

A period of P rows contains each source's quota exactly, evenly spread: row k of a source with quota q comes at the time
(k + 1/2) / q of the period, of several at one time that of the first source. The number of a source's rows before any
row has a closed form, independent of the layout and of how long the period is.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

ROUNDED_PERIOD = 2**16
"""Longest period of earlier versions, which rounded other shares to multiples of its inverse."""


class Mixture:
    """Assignment of rows to sources by `weights`, in any unit, whose shares are exact. With `rounded`, shares that need
    a period above `ROUNDED_PERIOD` are rounded as by earlier versions, to one row per period or more."""

    def __init__(self, weights: Sequence[float], *, rounded: bool = False) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self.period = math.lcm(*(share.denominator for share in shares))
        """Number of rows after which the interleaving repeats."""
        self.quotas = [int(share * self.period) for share in shares]
        """Number of rows of each source in a period."""
        if rounded and self.period > ROUNDED_PERIOD:
            self.quotas = [max(1, round(share * ROUNDED_PERIOD)) for share in shares]
            self.period = sum(self.quotas)
        common = math.lcm(*self.quotas)
        self._spacings = [common // quota for quota in self.quotas]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Source of a row, and the number of that source's rows before it."""
        counts = self.counts(row)
        source = self._next(counts)
        return source, counts[source]

    def counts(self, rows: int) -> list[int]:
        """Number of rows of each source among the first `rows` rows."""
        # At the time t / P of a period, sources have had their quota times that, rounded: at most half a row too many.
        time = rows - len(self.quotas) // 2
        counts = [max(0, (2 * quota * time + self.period) // (2 * self.period)) for quota in self.quotas]
        for _ in range(rows - sum(counts)):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Sequence[int]) -> int:
        """Source of the next row after these."""
        times = [(2 * count + 1) * spacing for count, spacing in zip(counts, self._spacings, strict=True)]
        return times.index(min(times))
