"""Efficiency of compared runs: Pareto frontiers, and scaling over devices."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_exp.compare.compared_metrics import METRIC_BY_NAME, WITH_PARENTS, Metric, differing_keys, has_failed
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.runs import Row
from titan_exp.config.schema.identity_keys import LAYOUT, flatten, is_among

ROUNDING = 1e-4
"""Relative loss difference that counts as equal, since layouts round differently."""


@dataclass(frozen=True)
class ParetoPoint:
    """Row of the comparison, by index."""

    row: int
    gpu_hours: float
    """Mean over seeds; for continued runs, including their parents'."""
    loss: float
    """Mean over seeds of the loss metric; lower is better."""
    is_on_front: bool
    """True unless another row is cheaper at no higher loss, or better at no higher cost."""


def cost_metric(comparison: Comparison) -> Metric:
    """GPU-hours, including those of parents if a run was continued."""
    return METRIC_BY_NAME[WITH_PARENTS if any(run.begins for run in comparison.runs) else "gpu_hours"]


def loss_metric(comparison: Comparison) -> Metric | None:
    """First compared metric that is a loss; None if there is none."""
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


GLOBAL_BATCH = "training.global_batch_size"

SPEED = METRIC_BY_NAME["tokens_per_second"]


@dataclass(frozen=True)
class ScalingPoint:
    """Row of the comparison in a scaling series, by index."""

    label: str
    """Short names and values of the layout keys."""
    row: int
    world_size: int
    tokens_per_second: float
    """Throughput of the whole job: mean over seeds of the median over steps."""
    speedup: float
    """Throughput relative to the fastest row at the smallest world size."""
    efficiency: float
    """Speedup over the ratio of world sizes; 1 is ideal."""


@dataclass(frozen=True)
class ScalingSeries:
    """Rows of the same experiment in different layouts."""

    kind: Literal["strong", "weak"]
    """Strong scaling has a fixed global batch; in weak scaling, the global batch grows with the world size."""
    fixed: str
    """Values that distinguish this series; empty if it is the only one."""
    points: tuple[ScalingPoint, ...]
    """Points sorted by world size, the fastest first."""


def scaling(comparison: Comparison) -> list[ScalingSeries]:
    """Scaling series: rows that differ only in layout, or also in the global batch, with at least two world sizes."""
    groups: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    for index, row in enumerate(comparison.rows):
        size, speed = row.runs[0].world_size, _speed(comparison, row)
        if size and speed:
            groups[_outside_layout(row.values)].append((size, speed, index))
    return [
        _series(comparison, points, alone=len(groups) == 1)
        for points in groups.values()
        if len({size for size, _, _ in points}) > 1
    ]


def _series(comparison: Comparison, measured: list[tuple[int, float, int]], *, alone: bool) -> ScalingSeries:
    configs = {index: comparison.rows[index].runs[0].config for _, _, index in measured}
    columns, outer = differing_keys(list(configs.values())), comparison.differing_keys
    first = comparison.rows[measured[0][2]].values
    measured = sorted(measured, key=lambda point: (point[0], -point[1]))
    smallest, reference, _ = measured[0]
    points = [
        ScalingPoint(
            columns.label(flatten(configs[index])),
            index,
            size,
            speed,
            speed / reference,
            speed / reference * smallest / size,
        )
        for size, speed, index in measured
    ]
    batches = {flatten(config).get(GLOBAL_BATCH) for config in configs.values()}
    fixed = "" if alone else outer.label(first, [key for key in outer.keys if key not in columns.keys])
    return ScalingSeries("strong" if len(batches) == 1 else "weak", fixed, tuple(points))


def _outside_layout(values: Mapping[str, Any]) -> str:
    return repr(
        sorted((key, value) for key, value in values.items() if key != GLOBAL_BATCH and not is_among(key, LAYOUT))
    )


def _speed(comparison: Comparison, row: Row) -> float | None:
    if all(has_failed(run, comparison.budget.tokens) for run in row.runs):
        return None
    known = [speed for run in row.runs if (speed := SPEED.read(run, comparison.budget.tokens))]
    return sum(known) / len(known) if known else None
