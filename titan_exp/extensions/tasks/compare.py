"""Tasks in `titan-exp compare`: scores by row, with intervals over items and seeds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.compare.comparison import UNEQUAL, Comparison
from titan_exp.compare.findings import MINUS, MISSING, verdict
from titan_exp.compare.output.formats import MARKS
from titan_exp.compare.output.study_sections import Section
from titan_exp.compare.runs import ComparedRun
from titan_exp.compare.statistics import LEVEL, Delta, holm
from titan_exp.config.errors.user_error import listed
from titan_exp.config.study.study import FEWEST_PAIRS
from titan_exp.extensions.tasks.scores import FOLDER, Evaluated, TaskScores, read_evaluation

BITS = "bits_per_byte"


def newest(run: ComparedRun, up_to: float) -> Evaluated | None:
    """Last evaluation of a run up to a number of tokens, or of its parents before it begins; None if there is none."""
    for path in sorted((Path(run.source) / FOLDER).glob("step-[0-9]*.json"), reverse=True):
        if (found := read_evaluation(path))[0] <= up_to * (1 + 1e-9):
            return found
    return None if run.parent is None else newest(run.parent, min(up_to, run.begins))


Runs = Mapping[object, Mapping[str, TaskScores]]  # scores by seed, and by task


@dataclass(frozen=True)
class Line:
    """Number to compare: a metric of a task, or its mean over several, whose accuracies are centered at chance."""

    metric: str
    tasks: tuple[TaskScores, ...]  # tasks, in the version that is compared

    @property
    def is_mean(self) -> bool:
        """True for a mean over tasks."""
        return len(self.tasks) > 1

    @property
    def name(self) -> str:
        """Name of the logged metric."""
        return f"tasks/{self.metric}" if self.is_mean else f"tasks/{self.tasks[0].task}/{self.metric}"

    def of(self, row: Runs) -> Runs:
        """Runs of a row that have the tasks in this version."""
        return {
            seed: run
            for seed, run in row.items()
            if all(one.task in run and _version(run[one.task]) == _version(one) for one in self.tasks)
        }

    def table(self, runs: Sequence[Mapping[str, TaskScores]], minus: Sequence[Mapping[str, TaskScores]]) -> np.ndarray:
        """Numbers [runs, items] whose mean is the mean over tasks, each a mean over its items; those of the runs in
        `minus` are subtracted, if there are any. A number is the mean, and an item's linearized residual: its variance
        is that of a ratio of sums, too."""
        residuals, mean = list[np.ndarray](), 0.0
        for one in self.tasks:
            metric = one.primary if self.metric != BITS else BITS
            values = np.stack([run[one.task].metrics[metric].items for run in runs])
            if minus:
                values = values - np.stack([run[one.task].metrics[metric].items for run in minus])
            if self.is_mean and metric != BITS:
                values = (values - (0.0 if minus else one.chance)) / (1 - one.chance)
            weights = one.metrics[metric].weights / one.metrics[metric].weights.sum()
            center = float(values.mean(axis=0) @ weights)
            residuals.append(weights * (values - center))
            mean += center / len(self.tasks)
        found = np.concatenate(residuals, axis=1) / len(self.tasks)
        return mean + found.shape[1] * found

    def measure(self, row: Runs, base: Runs | None) -> tuple[Delta | None, Delta | None]:
        """Score of a row, and its difference from the baseline if that is another row."""
        row, base = self.of(row), self.of(base or {})
        if not row:
            return None, None
        pairs = [(row[seed], base[seed]) for seed in row if seed in base]
        if len(pairs) < min(2, len(row), len(base)):  # no seed in common: runs are independent
            pairs = list(zip(row.values(), base.values(), strict=False))
        score = _delta(self.table([*row.values()], []))
        return score, _delta(self.table(*zip(*pairs, strict=True))) if pairs else None


def _version(one: TaskScores) -> tuple[str, tuple[str, ...]]:
    return one.digest, one.ids


def crossed(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard error and degrees of freedom (Satterthwaite) of differences [seeds, items], both samples."""
    n, m = differences.shape
    mean, rows, columns = differences.mean(), differences.mean(axis=1), differences.mean(axis=0)
    rest = ((differences - rows[:, None] - columns + mean) ** 2).sum() / ((n - 1) * (m - 1))
    a, b, c = rows.var(ddof=1) / n, columns.var(ddof=1) / m, rest / (n * m)
    variance, divisor = max(a + b - c, a, b), a**2 / (n - 1) + b**2 / (m - 1) + c**2 / ((n - 1) * (m - 1))
    return float(mean), math.sqrt(variance), float(variance**2 / divisor) if divisor else n - 1.0


def _delta(table: np.ndarray) -> Delta:
    """Mean of numbers [seeds, items] with its interval: over items, and over seeds if there are several."""
    from scipy.special import stdtr, stdtrit

    (n, m), mean = table.shape, float(table.mean())
    if m < 2 or not np.isfinite(mean):
        return Delta(mean, None, None, n, "paired")
    error, degrees = crossed(table)[1:] if n > 1 else (float(table.std(ddof=1)) / m**0.5, m - 1.0)
    reach = error * float(stdtrit(degrees, (1 + LEVEL) / 2))
    p = 2 * float(stdtr(degrees, -abs(mean) / error)) if error else float(mean == 0)
    return Delta(mean, mean - reach, mean + reach, n, "paired", p)


def _lines(read: Sequence[Runs], reference: Mapping[str, TaskScores]) -> Iterator[Line]:
    lines = [
        Line(metric, (one,))
        for one in reference.values()
        for metric in dict.fromkeys((BITS, one.primary))
        if metric == BITS or metric.startswith("acc")
    ]
    for metric in (BITS, "acc_centered"):
        tasks = [line.tasks[0] for line in lines if (line.metric == BITS) == (metric == BITS)]
        shared = tuple(one for one in tasks if all(len(Line("", (one,)).of(row)) == len(row) for row in read))
        if len(shared) > 1:
            yield Line(metric, shared)
    yield from lines


def sections(comparison: Comparison) -> Iterator[Section]:
    """Table of the tasks that rows have scores of."""
    budget, base = comparison.budget, comparison.baseline
    found = [
        {run.seed: one for run in row.runs if budget.reached(run) and (one := newest(run, budget.tokens)) is not None}
        for row in comparison.rows
    ]
    read: list[Runs] = [{seed: tasks for seed, (_, tasks) in row.items()} for row in found]
    reference: dict[str, TaskScores] = {}
    for row in (read[base], *read):
        for tasks in row.values():
            reference |= {task: one for task, one in tasks.items() if task not in reference}
    if not reference:
        return
    ladder = comparison.study is not None and comparison.study.ladder is not None
    lines = list(_lines(read, reference))
    measured = [
        [line.measure(row, None if ladder or place == base else read[base]) for place, row in enumerate(read)]
        for line in lines
    ]
    for kind in {(line.metric == BITS, line.is_mean) for line in lines}:
        cells = [(measured[at], place) for at, line in enumerate(lines) if (line.metric == BITS, line.is_mean) == kind
                 for place in range(len(read))]  # fmt: skip
        for (row, place), delta in zip(cells, holm([row[place][1] for row, place in cells]), strict=True):
            row[place] = row[place][0], delta
    rows, values, before, several = list[tuple[str, ...]](), [dict[str, Any]() for _ in read], "", len(read) > 1
    for line, row in zip(lines, measured, strict=True):
        title = f"mean of {len(line.tasks)} tasks" if line.is_mean else line.tasks[0].task
        head, before = ("" if title == before else title, line.metric), title
        for place, (score, delta) in enumerate(row):
            mark = _mark(comparison, line, delta)
            values[place] |= _values(line.name, score, delta, mark)
            if score is not None:
                change = "baseline" if place == base else f"{_text(delta, '+')} {mark}".strip()
                label = [comparison.rows[place].label][:several]
                rows.append((*head, *label, str(score.n), _text(score), *[change][:several]))
                head = ("", "")
    heads = ("task", "metric", *[""][:several], "n", "score", *["against the baseline"][:several])
    tokens = [one for row in found for one, _ in row.values()]
    notes = [*_notes(lines, measured), *_odd(comparison, read, reference)]
    if max(tokens) - min(tokens) > UNEQUAL * max(tokens):
        notes.append(f"Tasks were scored at unequal tokens, from {min(tokens):,} to {max(tokens):,}.")
    yield Section("Tasks", heads, 2 + several, tuple(rows), tuple(notes), values)


def _mark(comparison: Comparison, line: Line, delta: Delta | None) -> str:
    is_one = delta is not None and delta.n == 1  # an interval over items alone, which no number of seeds bounds
    tested = replace(delta, n=FEWEST_PAIRS) if delta is not None and is_one else delta
    found = verdict(replace(comparison.main, name=line.name), tested, comparison.standing)
    return "differs on these items" if is_one and found == "different" else MARKS.get(found, found)


def _text(delta: Delta | None, sign: str = "") -> str:
    if delta is None or not np.isfinite(delta.difference):
        return MISSING
    reach = "" if delta.high is None else f" ± {delta.high - delta.difference:.4f}"
    return f"{delta.difference:{sign}.4f}{reach}".replace("-", MINUS)


def _values(name: str, score: Delta | None, delta: Delta | None, mark: str) -> dict[str, Any]:
    """Numbers of a row, by the names that other metrics have in CSV and JSON."""
    own = {"": "difference", ".low": "low", ".high": "high", ".n": "n"}
    change = {".delta": "difference", ".delta_low": "low", ".delta_high": "high", ".p": "p", ".p_holm": "p_holm"}
    found = {
        f"{name}{suffix}": getattr(one, field, None)
        for one, names in ((score, own), (delta, change))
        for suffix, field in names.items()
    }
    return {**found, f"{name}.verdict": mark or None}


def _notes(lines: Sequence[Line], measured: Sequence[Sequence[tuple[Delta | None, Delta | None]]]) -> Iterator[str]:
    deltas = [delta for row in measured for _, delta in row if delta is not None]
    several = any(score is not None and score.n > 1 for row in measured for score, _ in row)
    yield "± is half of a 95 % interval, over items" + (" and seeds together." if several else ".")
    if any(delta.n == 1 for delta in deltas):
        yield (
            "With one seed, runs are compared on the same items. This tells two checkpoints apart, not their "
            "configurations, which another seed may order differently: train three seeds or more."
        )
    if deltas:
        yield (
            "n.d.: not distinguishable from the baseline; n.d.*: not after Holm's correction for all rows and tasks "
            f"of a metric; n < {FEWEST_PAIRS}: too few pairs of seeds."
        )
    if any(line.metric == "acc_centered" for line in lines):
        yield "acc_centered is the mean over tasks of (accuracy − chance) / (1 − chance)."


def _odd(comparison: Comparison, read: Sequence[Runs], reference: Mapping[str, TaskScores]) -> Iterator[str]:
    for task, one in reference.items():
        rows = [
            comparison.rows[place].label
            for place, row in enumerate(read)
            if any(task in run and _version(run[task]) != _version(one) for run in row.values())
        ]
        if rows:
            yield (
                f"{task} has other items in {listed(rows, 'and')} than in the baseline, so they are not compared. "
                "Score all with one version of the task and one evaluation.task_items."
            )
