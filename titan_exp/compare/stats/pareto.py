"""Which rows nothing else beats: the Pareto front of loss against GPU-hours."""

from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.compare.compared_metrics import METRICS, Metric
from titan_exp.compare.comparison import Comparison

ROUNDING = 1e-4
"""Losses closer than this, relatively, are equal here: layouts round differently, and none is better for that."""

COST = next(metric for metric in METRICS if metric.name == "gpu_hours")


@dataclass(frozen=True)
class ParetoPoint:
    """One row."""

    row: int
    """Its place in the comparison."""
    gpu_hours: float
    """Mean over seeds."""
    loss: float
    """Mean over seeds of the loss metric, lower is better."""
    is_on_front: bool
    """Whether no other row has both a lower loss and no more GPU-hours, or fewer of these and no higher loss."""


def loss_metric(comparison: Comparison) -> Metric | None:
    """The loss that the front is drawn over: the first compared one."""
    return next((metric for metric in comparison.metrics if metric.is_loss and metric.better == "min"), None)


def pareto(comparison: Comparison) -> list[ParetoPoint]:
    """Every row of which both are known, cheapest first. Differences within the noise of seeds count as differences."""
    metric = loss_metric(comparison)
    known: list[tuple[int, float, float]] = []
    for place, row in enumerate(comparison.rows):
        hours = [COST.read(run, comparison.point.tokens) for run in row.runs if comparison.point.reached(run)]
        costs = [cost for cost in hours if cost is not None]
        loss = row.estimates[metric.name] if metric else None
        if costs and loss is not None:
            known.append((place, sum(costs) / len(costs), loss.mean))
    return [
        ParetoPoint(place, cost, loss, not any(_beats(other, (cost, loss)) for other in _pairs(known)))
        for place, cost, loss in sorted(known, key=lambda entry: entry[1])
    ]


def _pairs(known: Sequence[tuple[int, float, float]]) -> list[tuple[float, float]]:
    return [(cost, loss) for _, cost, loss in known]


def _beats(one: tuple[float, float], two: tuple[float, float]) -> bool:
    margin = ROUNDING * abs(two[1])
    return one[0] <= two[0] and one[1] <= two[1] + margin and (one[0] < two[0] or one[1] < two[1] - margin)
