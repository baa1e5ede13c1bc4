"""Outcome of an adaptive study: its best points, its parameters against the metric, and its cost.

With successive halving a point is judged at the last rung that it reached, and parameters at the first, where all
points are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from titan_exp.compare.compared_metrics import DifferingKeys, value_text
from titan_exp.compare.runs import ComparedRun, Row, StudyRecord
from titan_exp.config.groups.training import sequences_after
from titan_exp.tracking.run_folder.metrics_jsonl import final_value
from titan_exp.tracking.run_folder.run_folder import has_diverged

EDGE = 0.1
"""Outer share of a range, on its own scale, within which the best value counts as at the edge."""


@dataclass(frozen=True)
class Trial:
    """Point of the study."""

    row: int
    """Index of the comparison's row."""
    label: str
    round: int
    """Last rung whose runs are done, or batch; 0 before the first."""
    value: float | None
    """Metric at the end of that rung, mean over seeds; infinite if a run diverged."""
    first: float | None
    """Metric at the end of the point's first run."""
    seeds: int


@dataclass(frozen=True)
class Marginal:
    """Mean of the metric over the points in a part of a parameter's range, whatever their other parameters."""

    part: str
    """Bounds, or a value of a choice."""
    mean: float | None
    """Mean over the points that have not diverged."""
    best: float | None
    points: int
    diverged: int


@dataclass(frozen=True)
class Parameter:
    """Varied key."""

    key: str
    short: str
    kind: str
    best: str
    """Value at the best point."""
    edge: str
    """`lower` or `upper` if the best value is in the outer tenth of the range."""
    marginals: tuple[Marginal, ...]
    points: tuple[tuple[Any, float | None], ...]
    """Value and metric at the end of the first run of every point."""


@dataclass(frozen=True)
class Cost:
    """Trained tokens of a study, against training every point to its end."""

    tokens: int
    whole_tokens: int
    gpu_hours: float | None
    """Wall-clock time times processes of all runs; None if unknown."""

    @property
    def whole_gpu_hours(self) -> float | None:
        """Estimated GPU-hours if every point were trained to its end, at the same speed."""
        return None if self.gpu_hours is None or not self.tokens else self.gpu_hours * self.whole_tokens / self.tokens


@dataclass(frozen=True)
class Learnt:
    """Outcome of a search or of successive halving."""

    metric: str
    better: str
    rungs: int
    """Number of rungs; 0 without halving."""
    trials: tuple[Trial, ...]
    """Points, best first; a point that went further is better than one that did not."""
    parameters: tuple[Parameter, ...]
    cost: Cost


def learn(rows: Sequence[Row], columns: DifferingKeys, study: StudyRecord, metric: str, better: str) -> Learnt:
    """Outcome of a study over the rows of its points."""
    trials = rank(rows, study, metric, better)
    ranges = study.parameters or {key: {"kind": "choice"} for key in columns.keys}
    parameters = [
        _parameter(columns, key, spec, rows, trials=trials, sign=-1 if better == "max" else 1)
        for key, spec in ranges.items()
        if key in columns.keys
    ]
    return Learnt(metric, better, len(study.rungs), tuple(trials), tuple(parameters), _cost(rows))


def rank(rows: Sequence[Row], study: StudyRecord, metric: str, better: str) -> list[Trial]:
    """Rank points, best first."""
    sign = -1 if better == "max" else 1
    trials = [_trial(index, row, study, metric, sign) for index, row in enumerate(rows)]
    return sorted(trials, key=lambda trial: (-trial.round if study.rungs else 0, _key(trial.value, sign)))


def _key(value: float | None, sign: int) -> float:
    return math.inf if value is None else sign * value


def _trial(index: int, row: Row, study: StudyRecord, metric: str, sign: int) -> Trial:
    if not study.rounds:
        found = row.estimates[metric]
        value = sign * math.inf if row.diverged(metric) else None if found is None else found.mean
        return Trial(index, row.label, int(value is not None), value, value, len(row.runs))
    chains = [_chain(run) for run in row.runs]
    done = [[run for run in chain if run.state == "done" or has_diverged(run.state, run.reason)] for chain in chains]
    reached = min(map(len, done), default=0)
    value = first = None
    if reached:
        value = _mean([_value(runs[reached - 1], metric, sign) for runs in done])
        first = _mean([_value(runs[0], metric, sign) for runs in done])
    last = max((study.rounds_of.get(runs[reached - 1].run_id, 1) for runs in done if reached), default=0)
    return Trial(index, row.label, last, value, first, len(row.runs))


def _chain(run: ComparedRun) -> list[ComparedRun]:
    """A run, preceded by the runs that it continues."""
    chain = [run]
    while chain[0].parent is not None:
        chain.insert(0, chain[0].parent)
    return chain


def _value(run: ComparedRun, metric: str, sign: int) -> float | None:
    if has_diverged(run.state, run.reason):
        return sign * math.inf
    value = final_value(run.rows, metric)
    return None if value is None else value if math.isfinite(value) else sign * math.inf


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _parameter(
    columns: DifferingKeys,
    key: str,
    spec: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    trials: Sequence[Trial],
    sign: int,
) -> Parameter:
    points = [(rows[trial.row].values[key], trial.first) for trial in trials]
    kind, chosen = str(spec["kind"]), rows[trials[0].row].values[key]
    if kind == "choice":
        parts = {value_text(value): [number for other, number in points if other == value] for value, _ in points}
    else:
        parts = _thirds(points)
    marginals = tuple(_marginal(part, numbers, sign) for part, numbers in parts.items())
    return Parameter(key, columns.short[key], kind, value_text(chosen), _edge(chosen, spec), marginals, tuple(points))


def _thirds(points: Sequence[tuple[Any, float | None]]) -> dict[str, list[float | None]]:
    """Metric in the lower, middle and upper third of the points, by the thirds' bounds."""
    ordered = sorted(points, key=lambda point: point[0])
    cuts = [round(len(ordered) * part / 3) for part in range(4)]
    parts: dict[str, list[float | None]] = {}
    for begin, end in pairwise(cuts):
        if inside := ordered[begin:end]:
            name = f"{value_text(inside[0][0])} … {value_text(inside[-1][0])}"
            parts.setdefault(name, []).extend(number for _, number in inside)
    return parts


def _marginal(part: str, numbers: Sequence[float | None], sign: int) -> Marginal:
    known = [number for number in numbers if number is not None]
    finite = [number for number in known if math.isfinite(number)]
    best = min(finite, key=lambda number: sign * number, default=None)
    return Marginal(part, fmean(finite) if finite else None, best, len(known), len(known) - len(finite))


def _edge(value: Any, spec: Mapping[str, Any]) -> str:
    if spec["kind"] == "choice" or "low" not in spec:
        return ""
    low, high = float(spec["low"]), float(spec["high"])
    scale = math.log if spec["kind"] == "log_uniform" else float
    place = (scale(float(value)) - scale(low)) / (scale(high) - scale(low))
    return "lower" if place <= EDGE else "upper" if place >= 1 - EDGE else ""


def _cost(rows: Sequence[Row]) -> Cost:
    runs = {run.run_id: run for row in rows for last in row.runs for run in _chain(last)}
    whole = 0
    for row in rows:
        for run in row.runs:
            training = run.config["training"]
            ramp, last = training.get("batch_ramp", ()), int(training["global_batch_size"])
            whole += sequences_after(ramp, last, int(training["steps"])) * int(training["seq_len"])
    seconds = [run.device_seconds for run in runs.values()]
    known = [number for number in seconds if number is not None]
    tokens = sum(max(0, run.tokens - run.begins) for run in runs.values())
    return Cost(tokens, whole, sum(known) / 3600 if len(known) == len(seconds) else None)
