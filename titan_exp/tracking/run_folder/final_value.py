"""Final value of a metric: the number by which runs are compared and ranked."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from titan_exp.tracking.run_folder.metric_rows import column_of
from titan_exp.tracking.sinks.sink import Value

Item = TypeVar("Item")


def final_value(rows: Sequence[Mapping[str, Value]], name: str) -> float | None:
    """Last value of a metric, or of the training loss, since a single batch is noisy, the mean of the last 2 % of its
    rows; NaN if it is not finite, None if it was never logged."""
    values = [float(value) for value in column_of(rows, name) if value is not None]
    if name != "loss":
        return values[-1] if values else None
    return tail_mean(values)


def tail_mean(values: list[float]) -> float | None:
    """Mean of the last 2 % of the values; NaN if one of them is not finite, None without values."""
    tail = last_fiftieth(values)
    return math.fsum(tail) / len(tail) if tail and all(map(math.isfinite, tail)) else math.nan if tail else None


def last_fiftieth(rows: list[Item]) -> list[Item]:
    """Last 2 % of the items, at least one."""
    return rows[-max(1, len(rows) // 50) :]
