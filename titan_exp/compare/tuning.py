"""Tuned comparison: each group of runs, such as an optimizer, at the best value of one key, such as its learning rate.

The best value is the one with the best mean over seeds, rather than the luckiest run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import harmonic_mean
from typing import Any

from titan_exp.compare.compared_metrics import ABSENT, DifferingKeys, Metric, final_loss, target_metric
from titan_exp.compare.runs import ComparedRun, Row, finite
from titan_exp.compare.statistics import Delta, Estimate, differences, estimate
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed

ROUNDING = 1e-9  # relative difference between equal losses


@dataclass(frozen=True)
class TunedPoint:
    """One value of the tuned key in a group."""

    value: Any
    row: int  # index of the comparison's row
    estimate: Estimate | None  # main metric over seeds; None if every run diverged or has not reached the budget
    diverged: int = 0  # number of seeds that diverged


@dataclass(frozen=True)
class Reached:
    """Cost of reaching the final loss of the baseline group's best runs, seed by seed."""

    estimate: Estimate | None  # over the seeds that reached it, ending with the longest run; None if none did
    reached: int  # number of seeds that reached it
    of: int


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the tuned key and the seed."""

    label: str
    points: tuple[TunedPoint, ...]  # values of the tuned key in order
    best: TunedPoint | None  # value with the best mean; None if there is none
    edge: str  # `lowest` or `highest` if the best value is the first or last number; `one value` if there is one
    delta: Delta | None  # difference between the best and the baseline group's best; None in the baseline's group
    steps: Reached
    seconds: Reached  # training time without evaluation and checkpoints, from the run's mean speed
    is_baseline: bool


@dataclass(frozen=True)
class Tuning:
    """Groups of a tuned comparison, best first."""

    key: str  # full name of the tuned key
    short: str
    metric: str  # title of the metric
    groups: tuple[Group, ...]


def tune(
    rows: Sequence[Row], columns: DifferingKeys, metric: Metric, tokens: float, *, key: str, baseline: int
) -> Tuning:
    """Group rows and choose each group's best value of `key`, a full or short name. Raises UserError if the runs do not
    differ in it, or no direction of the metric is better."""
    full = _tuned_key(columns, key)
    if metric.better is None:
        reason = f"we do not know whether less or more of {metric.name} is better"
        raise UserError(f"tune={key}: {reason}. Put another metric first: metrics=loss.")
    others = [column for column in columns.keys if column != full]
    members: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.values.get(full, ABSENT) != ABSENT:
            members.setdefault(columns.label(row.values, others) or "all runs", []).append(index)
    curves = {label: _curve(rows, indices, full, metric) for label, indices in members.items()}

    # A value that diverged with any seed is never the best.
    def rank(point: TunedPoint | None) -> tuple[bool, float]:
        found = None if point is None else point.estimate
        return (True, 0.0) if found is None else (False, found.mean if metric.better == "min" else -found.mean)

    bests = {
        label: min((one for one in points if one.estimate is not None and not one.diverged), key=rank, default=None)
        for label, points in curves.items()
    }
    reference = next((label for label, indices in members.items() if baseline in indices), next(iter(members)))
    base = bests[reference]
    base_runs = () if base is None else rows[base.row].runs
    losses = {run.seed: final_loss(run, tokens) for run in base_runs}
    targets: dict[object, float] = {seed: loss for seed, loss in losses.items() if loss is not None}
    numbers = [None if best is None else finite(rows[best.row].numbers[metric.name]) for best in bests.values()]
    deltas = differences(numbers, list(bests).index(reference))
    groups = [
        Group(
            label,
            points,
            best,
            _edge(points, best),
            delta,
            *_reached(() if best is None else rows[best.row].runs, targets, tokens),
            label == reference,
        )
        for (label, points), best, delta in zip(curves.items(), bests.values(), deltas, strict=True)
    ]
    groups.sort(key=lambda group: rank(group.best))
    return Tuning(full, columns.short[full], metric.title, tuple(groups))


def _tuned_key(columns: DifferingKeys, key: str) -> str:
    found = [full for full in columns.keys if key in (full, columns.short[full], full.rpartition(".")[2])]
    if len(found) == 1:
        return found[0]
    names = [columns.short[full] for full in columns.keys]
    offer = did_you_mean(key, names) or f"They differ in {listed(names, 'and') if names else 'no key'}."
    raise UserError(f"tune={key}: the runs do not differ in this key. {offer}")


def _curve(rows: Sequence[Row], indices: Sequence[int], key: str, metric: Metric) -> tuple[TunedPoint, ...]:
    named = [(index, rows[index]) for index in indices]
    points = [
        TunedPoint(row.values[key], index, row.estimates[metric.name], row.diverged(metric.name))
        for index, row in named
    ]
    numbers = all(_is_number(point.value) for point in points)
    return tuple(sorted(points, key=lambda point: point.value) if numbers else points)


def _edge(points: Sequence[TunedPoint], best: TunedPoint | None) -> str:
    if len(points) == 1:
        return "one value"
    if best is None or not all(_is_number(point.value) for point in points):
        return ""
    return "lowest" if best is points[0] else "highest" if best is points[-1] else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reached(runs: Sequence[ComparedRun], targets: Mapping[object, float], tokens: float) -> tuple[Reached, Reached]:
    """Steps and seconds to the target loss of each run's seed, or else to the mean of all targets."""
    steps: list[float] = []
    seconds: list[float] = []
    ends = [_spent(run, known[-1]) for run in runs if (known := run.series("tokens", tokens)[0])]
    mean = sum(targets.values()) / len(targets) if targets else None
    for run in runs:
        target = targets.get(run.seed, mean)
        # The last value of a smoothed curve is the final loss up to rounding.
        seen = None if target is None else target_metric(target + ROUNDING * abs(target)).read(run, tokens)
        if seen is None:
            continue
        step, took = _spent(run, seen)
        steps.append(step)
        seconds += [] if took is None else [took]
    last = max((step for step, _ in ends), default=math.inf)
    longest = max((took for _, took in ends if took is not None), default=math.inf)
    return (
        Reached(_within(estimate(steps), last), len(steps), len(runs)),
        Reached(_within(estimate(seconds), longest), len(seconds), len(runs)),
    )


def _spent(run: ComparedRun, tokens: float) -> tuple[float, float | None]:
    """Steps and seconds of a run up to the row with these tokens; None where its speed is unknown."""
    pairs = zip(run.rows.column("step"), run.rows.column("tokens"), strict=True)
    step = next(float(step or 0) for step, at in pairs if at == tokens)
    speed = _mean_speed(run, tokens)
    return step, (tokens - run.begins) / speed if speed else None


def _within(found: Estimate | None, end: float) -> Estimate | None:
    """Estimate of a mean between 0 and `end`, with its interval cut there."""
    if found is None or found.low is None or found.high is None:
        return found
    return replace(found, low=max(0.0, found.low), high=min(found.high, end))


def _mean_speed(run: ComparedRun, tokens: float) -> float | None:
    """Tokens divided by seconds over all measured rows up to `tokens`; None if there are none. A median would leave out
    work that an optimizer does every few steps, such as SOAP's power iterations, and an unweighted mean would
    undercount the larger steps of a growing batch."""
    ends = [run.begins, *run.series("tokens", above=run.begins)[0]]
    before = dict(zip(ends[1:], ends, strict=False))
    up_to = tokens if tokens > run.begins else math.inf
    rows = zip(*run.series("tokens_per_second", up_to, above=run.begins), strict=True)
    measured = [(speed, end - before[end]) for end, speed in rows if speed > 0 and math.isfinite(speed)]
    return harmonic_mean(*zip(*measured, strict=True)) if measured else None
