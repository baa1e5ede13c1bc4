"""Row of a comparison: runs that differ only in their seed."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.compare.run_record import Run
from titan_exp.compare.stats.ttest import Delta, Estimate


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str
    """Short names and values of the differing keys: `lr=0.003 tp=2`."""
    values: Mapping[str, Any]
    """Value by differing key; `ABSENT` if the configuration lacks it."""
    runs: tuple[Run, ...]
    """One run per seed."""
    numbers: Mapping[str, Mapping[object, float]]
    """Known values by metric and seed; NaN if the run diverged."""
    estimates: Mapping[str, Estimate | None]
    """Mean over seeds that have not diverged, by metric."""
    deltas: Mapping[str, Delta | None]
    """Difference to the baseline by metric; None in the baseline's row."""

    @property
    def states(self) -> dict[str, int]:
        """Number of runs in each state."""
        return dict(Counter(run.state for run in self.runs))

    def diverged(self, metric: str) -> int:
        """Number of runs whose metric is not finite."""
        return sum(not math.isfinite(number) for number in self.numbers[metric].values())


def finite(numbers: Mapping[object, float]) -> dict[object, float]:
    """Numbers of the runs that have not diverged."""
    return {seed: number for seed, number in numbers.items() if math.isfinite(number)}
