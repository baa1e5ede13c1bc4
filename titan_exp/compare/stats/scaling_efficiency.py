"""Speed against the number of processes: speedup and efficiency over the smallest world size."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from titan_exp.compare.compared_metrics import METRICS
from titan_exp.compare.comparison import Comparison, Row
from titan_exp.compare.differing_keys import differing_keys, flatten, value_text
from titan_exp.config.schema.identity_keys import LAYOUT, is_among

GLOBAL_BATCH = "training.global_batch_size"

SPEED = next(metric for metric in METRICS if metric.name == "tokens_per_second")


@dataclass(frozen=True)
class ScalingPoint:
    """One row of the comparison in its series."""

    label: str
    """Its layout, short."""
    row: int
    """Place of the row in the comparison."""
    world_size: int
    """Processes."""
    tokens_per_second: float
    """Of the whole job, mean over seeds of the median over steps."""
    speedup: float
    """Over the fastest row of the smallest world size."""
    efficiency: float
    """Speedup over how many times more processes there are: 1 is ideal."""


@dataclass(frozen=True)
class ScalingSeries:
    """Rows that compute the same and differ in their layout."""

    kind: Literal["strong", "weak"]
    """The same global batch, or one that grows with the number of processes."""
    fixed: str
    """What tells this series from others; empty where there is one."""
    points: tuple[ScalingPoint, ...]
    """By world size, faster ones first."""


def scaling(comparison: Comparison) -> list[ScalingSeries]:
    """Every set of rows with two world sizes or more that differ in nothing but layout, or in the global batch too."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(comparison.rows):
        if _world_size(row) and _speed(comparison, row):
            groups[_outside_layout(row.values)].append(place)
    found = []
    for places in groups.values():
        sizes = {_world_size(comparison.rows[place]) for place in places}
        if len(sizes) > 1:
            found.append(_series(comparison, places, alone=len(groups) == 1))
    return found


def _series(comparison: Comparison, places: list[int], *, alone: bool) -> ScalingSeries:
    rows = {place: comparison.rows[place] for place in places}
    columns = differing_keys([row.runs[0].config for row in rows.values()])
    measured = [(int(_world_size(row) or 0), float(_speed(comparison, row) or 0), place) for place, row in rows.items()]
    measured.sort(key=lambda entry: (entry[0], -entry[1]))
    smallest, reference, _ = measured[0]
    points = []
    for size, speed, place in measured:
        flat = flatten(rows[place].runs[0].config)
        label = " ".join(f"{columns.short[key]}={value_text(flat.get(key))}" for key in columns.keys)
        speedup = speed / reference
        points.append(ScalingPoint(label, place, size, speed, speedup, speedup * smallest / size))
    batches = {flatten(row.runs[0].config).get(GLOBAL_BATCH) for row in rows.values()}
    first = rows[places[0]].values
    inner = set(columns.keys)
    fixed = " ".join(
        f"{comparison.differing_keys.short[key]}={value_text(first[key])}"
        for key in comparison.differing_keys.keys
        if key not in inner
    )
    return ScalingSeries("strong" if len(batches) == 1 else "weak", "" if alone else fixed, tuple(points))


def _outside_layout(values: Mapping[str, Any]) -> str:
    return repr(
        sorted((key, value) for key, value in values.items() if key != GLOBAL_BATCH and not is_among(key, LAYOUT))
    )


def _world_size(row: Row) -> int | None:
    return row.runs[0].world_size


def _speed(comparison: Comparison, row: Row) -> float | None:
    found = [SPEED.read(run, comparison.point.tokens) for run in row.runs]
    known = [speed for speed in found if speed]
    return sum(known) / len(known) if known else None
