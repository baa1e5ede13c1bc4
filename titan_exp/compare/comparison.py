"""Runs compared: rows of repetitions, metrics at equal tokens, and differences to a baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_exp.compare.compared_metrics import Metric, choose_metrics
from titan_exp.compare.differing_keys import ABSENT, LABEL_OF_MODEL, DifferingKeys, differing_keys, flatten, value_text
from titan_exp.compare.run_record import Run
from titan_exp.compare.select_runs import Selection
from titan_exp.compare.stats.ttest import Delta, Estimate, difference, estimate, holm
from titan_exp.compare.study_runs import StudyRecord
from titan_exp.compare.token_budget import TokenBudget, choose_token_budget
from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed only."""

    label: str
    """What differs, short: `lr=0.003 tp=2`."""
    values: Mapping[str, Any]
    """Value of each key that differs, `not there` where the configuration lacks it."""
    runs: tuple[Run, ...]
    """One for each seed."""
    numbers: Mapping[str, Mapping[object, float]]
    """By metric and seed, as far as they are known; NaN where the run has diverged."""
    estimates: Mapping[str, Estimate | None]
    """By metric: the mean over seeds that have not diverged."""
    deltas: Mapping[str, Delta | None]
    """By metric: the difference to the baseline; None for the baseline itself."""

    @property
    def states(self) -> dict[str, int]:
        """How many runs are in each state."""
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.state] = found.get(run.state, 0) + 1
        return found

    def diverged(self, metric: str) -> int:
        """Runs whose metric is not finite."""
        return sum(not math.isfinite(number) for number in self.numbers[metric].values())


@dataclass(frozen=True)
class Comparison:
    """Everything that the table, the page and the files show."""

    name: str
    """Of the study, or of the folders."""
    study: StudyRecord | None
    """The study, where the runs belong to one."""
    point: TokenBudget
    """Where metrics are taken."""
    differing_keys: DifferingKeys
    """The columns."""
    metrics: tuple[Metric, ...]
    """What is compared; the first is the one that matters most."""
    rows: tuple[Row, ...]
    """In the order of the runs."""
    baseline: int
    """Place of the row that others are compared with."""
    baseline_why: str
    """In words: who chose it."""
    notes: tuple[str, ...]
    """Sentences about runs that were left out, missing or doubled."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, row by row."""
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def main(self) -> Metric:
        """The metric that the question is about."""
        return self.metrics[0]

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, if it is compared."""
        return next((metric for metric in self.metrics if metric.name == name), None)


def compare(
    selection: Selection,
    *,
    at: str = "least",
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    target: float | None = None,
) -> Comparison:
    """Compare runs.

    Args:
        selection: the runs.
        at: where, as `choose_token_budget` takes it.
        baseline: a row: its label, `key=value` pairs, or a run id; else the study's, else the first row.
        metrics: names; else the study's, else all that are known.
        target: loss for `tokens_to_target`.

    Raises:
        UserError: what was asked for is not there.
    """
    notes = list(selection.notes)
    runs = _without_doubles(selection.runs, notes)
    columns = differing_keys([run.config for run in runs])
    groups = _grouped(runs, columns, notes)
    if selection.study is None:
        groups.sort(key=lambda group: [_order(group[0][key]) for key in columns.keys])
    point = choose_token_budget(runs, at)
    wanted = [(name, None) for name in metrics] or (selection.study.metrics if selection.study else ())
    chosen = choose_metrics(wanted, runs, target)
    names = selection.study.points if selection.study else {}
    said = _said(columns, [values for values, _ in groups], names)
    rows = [_row(values, members, columns, chosen, point=point, names=names, said=said) for values, members in groups]
    asked = metrics or (selection.study is not None and selection.study.metrics)
    if not asked:
        chosen = [metric for metric in chosen if any(row.numbers[metric.name] for row in rows)] or chosen[:1]
        # Every batch has its own training loss; the validation split is the same for all, and so says more.
        chosen.sort(
            key=lambda metric: (
                not all(row.estimates["validation_loss"] for row in rows) or metric.name != "validation_loss"
            )
        )
    place, why = _baseline(rows, columns, baseline, selection.study)
    compared = _with_deltas(rows, place, chosen)
    study = selection.study
    return Comparison(selection.name, study, point, columns, tuple(chosen), tuple(compared), place, why, tuple(notes))


def _without_doubles(runs: Sequence[Run], notes: list[str]) -> list[Run]:
    """One run of each id: the same run in two studies' folders is the same numbers, and no second repetition."""
    best: dict[str, Run] = {}
    for run in runs:
        if run.run_id not in best or run.tokens > best[run.run_id].tokens:
            best[run.run_id] = run
    doubled = len(runs) - len(best)
    if doubled:
        notes.append(
            f"{doubled} of the runs {'is' if doubled == 1 else 'are'} there twice (the same id computes the same); "
            "the further advanced counts, once."
        )
    return list(best.values())


def _grouped(runs: Sequence[Run], columns: DifferingKeys, notes: list[str]) -> list[tuple[dict[str, Any], list[Run]]]:
    groups: dict[str, tuple[dict[str, Any], list[Run]]] = {}
    for run in runs:
        flat = flatten(run.config)
        every = {key: flat.get(key, ABSENT) for key in columns.all_keys}
        if LABEL_OF_MODEL in columns.stands_for:
            every[LABEL_OF_MODEL] = flat.get(LABEL_OF_MODEL, ABSENT)
        _, members = groups.setdefault(repr(sorted(every.items())), (every, []))
        if any(other.seed == run.seed for other in members):
            notes.append(
                f"{run.run_id} is left out: no key with an effect tells it from another run, though its id does."
            )
            continue
        members.append(run)
    for _, members in groups.values():
        members.sort(key=lambda run: _order(run.seed))
    return list(groups.values())


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, before words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))


def _said(columns: DifferingKeys, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Sequence[str]:
    """Columns that a row's label says: those that the study names, where they tell all rows apart, and else all.

    Others follow from these: steps of the decay from those of the run, a group's further keys from its option.
    """
    words = {word.partition("=")[0] for name in names.values() for word in name.split()}
    said = [key for key in columns.keys if columns.short[key] in words]
    return said if len({repr([row[key] for key in said]) for row in rows}) == len(rows) else columns.keys


def _row(
    values: dict[str, Any],
    runs: list[Run],
    columns: DifferingKeys,
    metrics: Sequence[Metric],
    *,
    point: TokenBudget,
    names: Mapping[str, str],
    said: Sequence[str],
) -> Row:
    numbers: dict[str, dict[object, float]] = {}
    for metric in metrics:
        read = {
            run.seed: metric.read(run, point.tokens) for run in runs if point.reached(run) or not metric.needs_point
        }
        numbers[metric.name] = {seed: number for seed, number in read.items() if number is not None}
    estimates = {name: estimate(list(_finite(found).values())) for name, found in numbers.items()}
    label = " ".join(f"{columns.short[key]}={value_text(values[key])}" for key in said)
    # A name that the study's author gave says more than the values behind it; the overrides themselves do not.
    given = {names.get(run.run_id, "") for run in runs}
    if len(given) == 1 and (name := given.pop()):
        axes = {word.partition("=")[0] for word in name.split()}
        label = label if "=" in name and axes <= set(columns.short.values()) else name
    return Row(label or "(nothing differs)", values, tuple(runs), numbers, estimates, {})


def _with_deltas(rows: Sequence[Row], place: int, metrics: Sequence[Metric]) -> list[Row]:
    deltas: list[dict[str, Delta | None]] = [{} for _ in rows]
    for metric in metrics:
        reference = _finite(rows[place].numbers[metric.name])
        found = [
            None if index == place else difference(_finite(row.numbers[metric.name]), reference)
            for index, row in enumerate(rows)
        ]
        for index, delta in enumerate(holm(found)):
            deltas[index][metric.name] = delta
    return [replace(row, deltas=found) for row, found in zip(rows, deltas, strict=True)]


def _finite(numbers: Mapping[object, float]) -> dict[object, float]:
    return {seed: number for seed, number in numbers.items() if math.isfinite(number)}


def _baseline(
    rows: Sequence[Row], columns: DifferingKeys, asked: str | None, study: StudyRecord | None
) -> tuple[int, str]:
    if asked is not None:
        return _find_row(rows, columns, asked, study), "as asked for"
    if study is not None and study.baseline is not None:
        ids = [run_id for run_id, label in study.points.items() if label == study.baseline]
        for place, row in enumerate(rows):
            if any(run.run_id in ids for run in row.runs):
                return place, "the study's"
        try:
            return _find_row(rows, columns, study.baseline, study), "the study's"
        except UserError:
            return 0, f"the first row, since the study's ({study.baseline}) has no run"
    return 0, "the first row; --baseline chooses another"


def _find_row(rows: Sequence[Row], columns: DifferingKeys, asked: str, study: StudyRecord | None) -> int:
    """The one row that is meant."""
    points = study.points if study else {}
    exact = [
        place
        for place, row in enumerate(rows)
        if asked == row.label or any(asked in (run.run_id, points.get(run.run_id)) for run in row.runs)
    ]
    pairs = [word.partition("=") for word in asked.replace(",", " ").split() if "=" in word]
    found = exact or [place for place, row in enumerate(rows) if pairs and _matches(row, columns, pairs)]
    found = found or [place for place, row in enumerate(rows) if any(run.run_id.startswith(asked) for run in row.runs)]
    if len(found) == 1:
        return found[0]
    if found:
        matching = "\n".join(f"    {rows[place].label}" for place in found[:20])
        raise UserError(f"baseline={asked}: several rows match. Say which:\n{matching}")
    labels = [row.label for row in rows]
    offer = did_you_mean(asked, labels) or "The rows are:\n" + "\n".join(f"    {label}" for label in labels[:20])
    raise UserError(f"baseline={asked}: no row matches. {offer}")


def _matches(row: Row, columns: DifferingKeys, pairs: Sequence[tuple[str, str, str]]) -> bool:
    """Whether a row has all of these values, of columns by either name or of any other key by its full one."""
    values = {**flatten(row.runs[0].config), **{columns.short[key]: row.values[key] for key in columns.keys}}
    return all(name in values and _same(values[name], text) for name, _, text in pairs)


def _same(value: Any, text: str) -> bool:
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return value_text(value) == text
