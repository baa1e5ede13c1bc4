"""Outcome of a study: final losses of a ladder and its scaling law; an adaptive study's best points and parameters.

With successive halving a point is judged at the last rung that it reached, and parameters at the first, where all
points are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from titan_exp.compare.compared_metrics import DifferingKeys, value_text
from titan_exp.compare.runs import ComparedRun, Row
from titan_exp.compare.statistics import Multiplier, Rung, ScalingLaw, compute_multiplier, fit, hold_out
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.training import sequences_after
from titan_exp.launch.run_lookup import StudyRecord
from titan_exp.tracking.display import format_count, format_items
from titan_exp.tracking.run_folder.metrics_jsonl import final_value
from titan_exp.tracking.run_folder.run_folder import has_diverged

FURTHER = 4  # multiple of the largest rung's compute to which a law that passed its test is extrapolated
CURVE = 40  # points of a law's curve in a plot
Seeds = Mapping[int | None, float]  # final loss by seed


@dataclass(frozen=True)
class LadderRow:
    """One size and length."""

    scale: str
    per_parameter: str
    parameters: int
    tokens: int
    flops: Mapping[str, float]  # FLOPs of a run by arm, baseline first
    losses: Mapping[str, Seeds]  # finite final losses by arm
    diverged: int  # runs that diverged
    multiplier: tuple[float, float, float] | None = None  # compute multiplier with its bounds


@dataclass(frozen=True)
class LawNumbers:
    """Law of the baseline's final losses."""

    variables: tuple[str, ...]  # N and D, or C alone
    irreducible: float
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]
    intervals: tuple[tuple[float, float], ...]  # of the exponents
    noise: float  # standard deviation of one run, pooled within rungs
    freedom: int

    @property
    def form(self) -> str:
        """Formula with its numbers."""
        terms = zip(self.coefficients, self.variables, self.exponents, strict=True)
        return f"L = {self.irreducible:.4g}" + "".join(f" + {a:.4g} / {x}^{power:.3g}" for a, x, power in terms)


@dataclass(frozen=True)
class Predicted:
    """Loss that a law predicts, with the bounds of its interval."""

    parameters: int
    tokens: int
    flops: float
    loss: float
    low: float
    high: float
    measured: float | None = None  # mean loss of the rung; None of an extrapolation

    @property
    def text(self) -> str:
        """Loss with its interval."""
        return f"{self.loss:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class LadderOutcome:
    """Outcome of a ladder."""

    metric: str
    arms: tuple[str, ...]  # baseline, and the candidate if there is one
    rows: tuple[LadderRow, ...]  # rungs with a finished run, by size and length
    law: LawNumbers | None
    held_out: Predicted | None  # longest run of the largest size, by the law of all smaller sizes
    extrapolated: Predicted | None
    multiplier: Multiplier | None
    refusals: tuple[str, ...]  # sentences about what these runs do not tell
    curves: Mapping[str, tuple[tuple[float, float], ...]]  # FLOPs and loss along the law, by tokens per parameter

    @property
    def sentences(self) -> Iterator[str]:
        """Law, test, multiplier and extrapolation in words."""
        largest, law = self.rows[-1], self.law
        if law is not None:
            bounds = zip(law.variables, law.intervals, strict=True)
            exponents = ", ".join(f"[{low:.3g}, {high:.3g}] of {x}" for x, (low, high) in bounds)
            yield (
                f"Law of {self.arms[0] or 'these runs'}: {law.form}. The exponents have 95 % intervals {exponents}. "
                f"One run has a standard deviation of {law.noise:.2g}, pooled within rungs ({law.freedom} degrees of "
                "freedom)."
            )
        if (test := self.held_out) is not None and test.measured is not None:
            outcome = "It holds" if test.low <= test.measured <= test.high else "It fails"
            yield (
                f"Hold-out test: the law of the smaller sizes predicts {test.text} at the largest size run, where "
                f"{test.measured:.4f} was measured. {outcome}."
            )
        if (found := self.multiplier) is not None and largest.multiplier is not None:
            same = "" if found.constancy is None else f" (p = {found.constancy:.2g} in the test of that)"
            yield (
                f"Compute multiplier of {self.arms[1]} against {self.arms[0]}: {times(largest.multiplier)} at the "
                f"largest size run. Pooled over all rungs, as if it were the same at each{same}: "
                f"{times((found.estimate, found.low, found.high))}. Above 1, {self.arms[1]} needs less compute for the "
                "same loss. Intervals are 95 %."
            )
        if (beyond := self.extrapolated) is not None and test is not None and test.measured is not None and law:
            yield (
                f"Extrapolation, beyond every run: at {FURTHER} times the compute of the largest "
                f"({format_count(beyond.parameters)} parameters, {format_count(beyond.tokens)} tokens), {beyond.text}, "
                f"if {law.form} still holds there. At the hold-out test it was off by "
                f"{abs(test.measured - test.loss):.4f}."
            )
        yield from self.refusals


def times(multiplier: tuple[float, float, float]) -> str:
    """Compute multiplier with its interval."""
    return "{:.4g} [{:.4g}, {:.4g}]".format(*multiplier)


def climb(runs: Sequence[ComparedRun], study: StudyRecord) -> LadderOutcome | None:
    """Outcome of a ladder by the final losses of its runs; None before the first has ended."""
    assert study.ladder is not None
    base, metric = study.ladder.baseline, study.ladder.metric
    arms = tuple(dict.fromkeys([base, *(point.rung.arm for point in study.by_run.values() if point.rung)]))
    rows, notes = _rows(runs, study, arms), list[str]()
    if not rows:
        return None
    if missing := study.ladder.runs - sum(run.final(metric) is not None for run in runs):
        notes.append(f"The ladder waits for {format_items(missing, 'run')}. All numbers are without what is missing.")
    if diverged := sum(row.diverged for row in rows):
        notes.append(f"{format_items(diverged, 'run')} diverged. We fit the law without their rungs.")
    used = [row for row in rows if not row.diverged and row.losses[base]]
    both = len({row.per_parameter for row in used}) > 1
    if not both and not missing:
        notes.append(
            "All rungs have the same tokens per parameter, so the law is over FLOPs (C). For one over parameters and "
            "tokens, write more, as in tokens_per_parameter: [10, 20, 40]."
        )
    rungs = [Rung(_at(row, base, both), tuple(row.losses[base].values())) for row in used]
    law = test = beyond = multiplier = None
    try:
        law = fit(rungs)
    except UserError as error:
        notes.append(f"No law: {error}")
    if law is not None:
        test, beyond, further = _tested(used, rungs, law, base)
        multiplier, rows, why = _multiplied(rows, used, law, arms, both=both)
        notes += [*further, *why]
    elif len(arms) > 1:
        notes.append("No compute multiplier: it is a difference of losses over the slope of the baseline's law.")
    numbers, curves = None, dict[str, tuple[tuple[float, float], ...]]()
    if law is not None:
        numbers = LawNumbers(
            ("N", "D") if both else ("C",),
            law.irreducible,
            law.coefficients,
            tuple(law.exponents.tolist()),
            tuple(law.exponent_intervals()),
            law.noise,
            law.freedom,
        )
        curves = _curves(used, law, base, both=both)
    return LadderOutcome(metric, arms, tuple(rows), numbers, test, beyond, multiplier, tuple(notes), curves)


def _rows(runs: Sequence[ComparedRun], study: StudyRecord, arms: Sequence[str]) -> list[LadderRow]:
    assert study.ladder is not None
    found: dict[tuple[int, int], LadderRow] = {}
    for run in runs:
        point, loss = study.by_run.get(run.run_id), run.final(study.ladder.metric)
        if point is None or (rung := point.rung) is None or loss is None:
            continue
        key = (rung.parameters, rung.tokens)
        empty = LadderRow(rung.scale, rung.per_parameter, *key, {}, {arm: {} for arm in arms}, 0)
        row, finite = found.get(key, empty), math.isfinite(loss)
        losses = {**row.losses, rung.arm: {**row.losses[rung.arm], **({run.seed: loss} if finite else {})}}
        flops = {**row.flops, rung.arm: rung.flops}
        found[key] = replace(row, flops=flops, losses=losses, diverged=row.diverged + (not finite))
    return [found[key] for key in sorted(found)]


def _at(row: LadderRow, arm: str, both: bool) -> tuple[float, ...]:
    return (row.parameters, row.tokens) if both else (row.flops[arm],)


def _tested(
    used: Sequence[LadderRow], rungs: Sequence[Rung], law: ScalingLaw, base: str
) -> tuple[Predicted | None, Predicted | None, list[str]]:
    last = used[-1]
    try:
        test = hold_out(rungs)
    except UserError as error:
        return None, None, [f"No hold-out test, so nothing is extrapolated: {error}"]
    flops = last.flops[base]
    held_out = Predicted(last.parameters, last.tokens, flops, test.predicted, test.low, test.high, test.measured)
    if not test.holds:
        return held_out, None, [f"Nothing is extrapolated: {test.refusal}"]
    root = math.sqrt(FURTHER)
    parameters, tokens = round(last.parameters * root), round(last.tokens * root)
    at = (parameters, tokens) if len(law.exponents) > 1 else (FURTHER * flops,)
    beyond = Predicted(parameters, tokens, FURTHER * flops, law.loss(*at), *law.interval(*at))
    return held_out, beyond, []


def _multiplied(
    rows: list[LadderRow], used: Sequence[LadderRow], law: ScalingLaw, arms: Sequence[str], *, both: bool
) -> tuple[Multiplier | None, list[LadderRow], list[str]]:
    """Compute multiplier of the candidate, rows with that of their rung, and the sentences of refusals. Both arms of a
    rung have the same tokens. If a token costs the candidate other FLOPs, the multiplier counts them."""
    if len(arms) < 2:
        return None, rows, []
    base, candidate = arms
    pairs: dict[int, list[float]] = {}
    for index, row in enumerate(rows):
        ours, theirs = row.losses[base], row.losses[candidate]
        if row in used and (common := [seed for seed in ours if seed in theirs]):
            pairs[index] = [ours[seed] - theirs[seed] for seed in common]
    try:
        found = compute_multiplier(law, [(_at(rows[index], base, both), found) for index, found in pairs.items()])
    except UserError as error:
        return None, rows, [f"No compute multiplier: {error}"]
    ratios = [rows[index].flops[base] / rows[index].flops[candidate] for index in pairs]
    mean = math.exp(fmean(map(math.log, ratios)))
    by_rung = tuple((e * r, low * r, high * r) for (e, low, high), r in zip(found.by_rung, ratios, strict=True))
    rows = list(rows)
    for index, numbers in zip(pairs, by_rung, strict=True):
        rows[index] = replace(rows[index], multiplier=numbers)
    low, high = found.low * mean, found.high * mean
    return replace(found, estimate=found.estimate * mean, low=low, high=high, by_rung=by_rung), rows, []


def _curves(
    used: Sequence[LadderRow], law: ScalingLaw, base: str, *, both: bool
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Law along each number of tokens per parameter, between the smallest and the largest size."""
    found = {}
    for per in dict.fromkeys(row.per_parameter for row in used):
        rows = [row for row in used if row.per_parameter == per]
        logs = np.log([[row.flops[base], *_at(row, base, both)] for row in rows])
        flops = np.linspace(logs[0, 0], logs[-1, 0], CURVE)
        at = [np.exp(np.interp(flops, logs[:, 0], column)) for column in logs[:, 1:].T]
        losses = [law.loss(*place) for place in zip(*at, strict=True)]
        found[per] = tuple(zip(np.exp(flops).tolist(), losses, strict=True))
    return found


EDGE = 0.1  # outer share of a range, on its own scale, within which the best value counts as at the edge


@dataclass(frozen=True)
class Trial:
    """Point of the study."""

    row: int  # index of the comparison's row
    label: str
    round: int  # last rung whose runs are done, or batch; 0 before the first
    value: float | None  # metric at the end of that rung, mean over seeds; infinite if a run diverged
    first: float | None  # metric at the end of the point's first run
    seeds: int


@dataclass(frozen=True)
class Marginal:
    """Mean of the metric over the points in a part of a parameter's range, whatever their other parameters."""

    part: str  # bounds, or a value of a choice
    mean: float | None  # mean over the points that have not diverged
    best: float | None
    points: int
    diverged: int


@dataclass(frozen=True)
class Parameter:
    """Varied key."""

    key: str
    short: str
    kind: str
    best: str  # value at the best point
    edge: str  # `lower` or `upper` if the best value is in the outer tenth of the range
    marginals: tuple[Marginal, ...]
    points: tuple[tuple[Any, float | None], ...]  # value and metric at the end of the first run of every point


@dataclass(frozen=True)
class Cost:
    """Trained tokens of a study, against training every point to its end."""

    tokens: int
    whole_tokens: int
    gpu_hours: float | None  # wall-clock time times processes of all runs; None if unknown

    @property
    def whole_gpu_hours(self) -> float | None:
        """Estimated GPU-hours if every point were trained to its end, at the same speed."""
        return None if self.gpu_hours is None or not self.tokens else self.gpu_hours * self.whole_tokens / self.tokens


@dataclass(frozen=True)
class Learnt:
    """Outcome of a search or of successive halving."""

    metric: str
    better: str
    rungs: int  # number of rungs; 0 without halving
    trials: tuple[Trial, ...]  # points, best first; a point that went further is better than one that did not
    parameters: tuple[Parameter, ...]
    cost: Cost


def learn(rows: Sequence[Row], columns: DifferingKeys, study: StudyRecord, metric: str, better: str) -> Learnt:
    """Outcome of a study over the rows of its points."""
    trials = rank(rows, study, metric, better)
    ranges = study.parameters or {key: {"kind": "choice"} for key in columns.keys}
    sign, parameters = -1 if better == "max" else 1, list[Parameter]()
    for key, spec in ranges.items():
        if key not in columns.keys:
            continue
        points = [(rows[trial.row].values[key], trial.first) for trial in trials]
        kind, chosen = str(spec["kind"]), rows[trials[0].row].values[key]
        if kind == "choice":
            parts = {value_text(value): [number for other, number in points if other == value] for value, _ in points}
        else:
            parts = _thirds(points)
        marginals = []
        for part, numbers in parts.items():
            known = [number for number in numbers if number is not None]
            finite = [number for number in known if math.isfinite(number)]
            best = min(finite, key=lambda number: sign * number, default=None)
            marginals.append(Marginal(part, _mean(finite), best, len(known), len(known) - len(finite)))
        best, edge = value_text(chosen), _edge(chosen, spec)
        parameters.append(Parameter(key, columns.short[key], kind, best, edge, tuple(marginals), tuple(points)))
    return Learnt(metric, better, len(study.rungs), tuple(trials), tuple(parameters), _cost(rows))


def rank(rows: Sequence[Row], study: StudyRecord, metric: str, better: str) -> list[Trial]:
    """Rank points, best first."""
    sign = -1 if better == "max" else 1
    trials = [_trial(index, row, study, metric, sign) for index, row in enumerate(rows)]
    values = [math.inf if trial.value is None else sign * trial.value for trial in trials]
    return sorted(trials, key=lambda trial: (-trial.round if study.rungs else 0, values[trial.row]))


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
    points = [study.by_run.get(runs[reached - 1].run_id) for runs in done if reached]
    last = max((1 if point is None else point.round for point in points), default=0)
    return Trial(index, row.label, last, value, first, len(row.runs))


def _chain(run: ComparedRun) -> list[ComparedRun]:
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
