"""Pareto front of loss against GPU-hours."""

from dataclasses import dataclass

from titan_exp.compare.compared_metrics import METRIC_BY_NAME, WITH_PARENTS, Metric
from titan_exp.compare.comparison import Comparison

ROUNDING = 1e-4
"""Relative loss difference that counts as equal, since layouts round differently."""


@dataclass(frozen=True)
class ParetoPoint:
    """Row of the comparison, by index."""

    row: int
    gpu_hours: float
    """Mean over seeds; of continued runs with their parents'."""
    loss: float
    """Mean over seeds of the loss metric; lower is better."""
    is_on_front: bool
    """True unless another row is cheaper at no higher loss, or better at no higher cost."""


def cost_metric(comparison: Comparison) -> Metric:
    """GPU-hours, with those of parents if a run was continued."""
    return METRIC_BY_NAME[WITH_PARENTS if any(run.begins for run in comparison.runs) else "gpu_hours"]


def loss_metric(comparison: Comparison) -> Metric | None:
    """First compared loss metric; None without one."""
    return next((metric for metric in comparison.metrics if metric.is_loss and metric.better == "min"), None)


def pareto(comparison: Comparison) -> list[ParetoPoint]:
    """Rows with a known loss and cost, cheapest first. Noise between seeds is not considered."""
    metric, cost, budget = loss_metric(comparison), cost_metric(comparison), comparison.budget
    known: list[tuple[float, float, int]] = []
    for index, row in enumerate(comparison.rows):
        hours = [cost.read(run, budget.tokens) for run in row.runs if budget.reached(run)]
        costs = [number for number in hours if number is not None]
        loss = row.estimates[metric.name] if metric else None
        if costs and loss is not None:
            known.append((sum(costs) / len(costs), loss.mean, index))
    return [
        ParetoPoint(index, cost, loss, not any(_dominates(other[:2], (cost, loss)) for other in known))
        for cost, loss, index in sorted(known, key=lambda point: point[0])
    ]


def _dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    margin = ROUNDING * abs(other[1])
    no_worse = point[0] <= other[0] and point[1] <= other[1] + margin
    return no_worse and (point[0] < other[0] or point[1] < other[1] - margin)
