"""Comparison of runs: metrics at equal tokens, grouped over seeds, with differences from a baseline."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from titan_exp.compare.compared_metrics import (
    ABSENT,
    RUNG_KEYS,
    DifferingKeys,
    Metric,
    choose_metrics,
    differing_keys,
    flatten,
    has_failed,
)
from titan_exp.compare.runs import ComparedRun, Row, Selection, finite
from titan_exp.compare.statistics import differences, estimate
from titan_exp.compare.study_outcome import LadderOutcome, Learnt, climb, learn, rank
from titan_exp.compare.tuning import Tuning, tune
from titan_exp.config.errors.user_error import UserError, did_you_mean, shown
from titan_exp.config.extension import loaded
from titan_exp.config.study.labels import spelled, words_of
from titan_exp.launch.evidence import PairedRun, Standing, standing_of
from titan_exp.launch.run_lookup import StudyRecord
from titan_exp.tracking.display import format_items

COUNTED = ("done", "running", "unknown", "preempted")
"""Run states that may limit the budget; runs in other states ended early."""

UNEQUAL = 0.02
"""Fraction of the budget by which last values may lie apart without a remark; a mean loss covers as many rows."""


@dataclass(frozen=True)
class TokenBudget:
    """Number of tokens at which metrics are read."""

    tokens: float
    """Number of tokens; infinite if every run is compared at its end."""
    why: str
    """Reason, for the heading."""

    def reached(self, run: ComparedRun) -> bool:
        """True if a run has trained on that many tokens."""
        if math.isinf(self.tokens):
            return bool(run.rows)
        return run.tokens >= self.tokens * (1 - 1e-9) and bool(run.rows)


def choose_token_budget(runs: Sequence[ComparedRun], at: str) -> TokenBudget:
    """Choose the token budget. `at` is `least` (the least advanced run that has not failed), `done` (the least advanced
    finished run), `end` (each run at its end), or a number of tokens (`30720`, `1e9`, `2.5B`). Raises UserError for any
    other value, or if no run has that many tokens."""
    begun = [run for run in runs if run.tokens]
    if not begun:
        return TokenBudget(0, "no run has logged a step yet")
    if at == "end":
        return TokenBudget(math.inf, "each run at its own end, which is not at equal tokens")
    if at in ("least", "done"):
        counted = [run for run in begun if run.state == "done" or (at == "least" and run.state in COUNTED)]
        return _least(counted or begun, begun)
    tokens = _tokens(at)
    furthest = max(run.tokens for run in begun)
    if tokens > furthest:
        raise UserError(f"at={at}: no run has seen that many tokens. The longest has seen {furthest:,}.")
    return TokenBudget(tokens, "as requested")


def unequal_tokens(runs: Sequence[ComparedRun], metrics: Sequence[Metric], budget: TokenBudget) -> list[str]:
    """Sentence for each metric that is logged so rarely that its last values up to the budget are at unequal tokens."""
    if math.isinf(budget.tokens):
        return []
    found = []
    for metric in metrics:
        logged = [(run, run.series(metric.name, budget.tokens)[0]) for run in runs if budget.reached(run)]
        known = [(tokens, run) for run, tokens in logged if tokens] if metric.needs_point else []
        if not known:
            continue
        first, last = (pick(known, key=lambda entry: entry[0][-1]) for pick in (min, max))
        if last[0][-1] - first[0][-1] <= UNEQUAL * budget.tokens:
            continue
        common = max(set.intersection(*(set(tokens) for tokens, _ in known)), default=None)
        remedy = "" if common is None else f" To compare all at equal tokens, add --at {common:.0f}."
        found.append(
            f"{metric.title} is at unequal tokens: the last value of {first[1].run_id} is at {first[0][-1]:,.0f}, that "
            f"of {last[1].run_id} at {last[0][-1]:,.0f}.{remedy}"
        )
    return found


def _least(counted: Sequence[ComparedRun], begun: Sequence[ComparedRun]) -> TokenBudget:
    tokens = min(run.tokens for run in counted)
    if all(run.tokens == tokens for run in begun):
        return TokenBudget(tokens, "where every run ends")
    if all(run.tokens == tokens and run.state == "done" for run in counted):
        return TokenBudget(tokens, "where every finished run ends")
    behind = next(run for run in counted if run.tokens == tokens)
    at_done = "; --at done takes finished runs alone" if any(run.state == "done" for run in counted) else ""
    return TokenBudget(tokens, f"where the least advanced is ({behind.run_id}, {behind.shown}{at_done})")


def _tokens(at: str) -> float:
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}.get(at[-1:].lower(), 1.0)
    try:
        tokens = float(at[:-1] if scale != 1.0 else at) * scale
    except ValueError:
        tokens = -1.0
    if not (tokens > 0 and math.isfinite(tokens)):
        raise UserError(f"at={at}: this must be least, done, end, or a number of tokens (30.72k, 1e9, 2.5B).")
    return tokens


@dataclass(frozen=True)
class Comparison:
    """Runs compared at equal tokens; source of all outputs."""

    name: str
    """Name of the study or of the folders."""
    study: StudyRecord | None
    """None if the runs belong to no study."""
    budget: TokenBudget
    differing_keys: DifferingKeys
    """Table columns."""
    metrics: tuple[Metric, ...]
    """Metrics, the main one first."""
    rows: tuple[Row, ...]
    baseline: int
    """Index of the baseline row."""
    baseline_why: str
    """Reason for the baseline, as a clause."""
    notes: tuple[str, ...]
    """Remarks about omitted, missing or duplicate runs."""
    tuning: Tuning | None = None
    """Groups at their best values of a tuned key; None if no key is tuned."""
    learnt: Learnt | None = None
    """Outcome of a search or of successive halving; None for other runs."""
    standing: Standing | None = None
    """Standing of the study's registered question; None of an exploratory comparison."""
    ladder: LadderOutcome | None = None
    """Outcome of a ladder of sizes; None of other runs, and before the first has ended."""

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """All runs, row by row."""
        return tuple(run for row in self.rows for run in row.runs)

    @property
    def main(self) -> Metric:
        """Main metric."""
        return self.metrics[0]

    @cached_property
    def added_sections(self) -> list[Any]:
        """Sections of extensions, as `titan_exp.compare.output.study_sections.Section`."""
        return [section for add in loaded("sections") for section in add(self)]


def compare(
    selection: Selection,
    *,
    at: str = "least",
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    target: float | None = None,
    tuned: str | None = None,
) -> Comparison:
    """Compare runs at the token budget `at` (see `choose_token_budget`). `baseline` is a row label, `key=value` pairs
    or a run id; default: the study's, else the first row. `metrics` default to the study's, else all known ones;
    `target` is the loss for `tokens_to_target`; `tuned` is the key over which groups are tuned, by default the study's,
    `none` for none. Raises UserError about an unknown budget, baseline, metric or key."""
    notes, study = list(selection.notes), selection.study
    runs = _without_duplicates(selection.runs, notes)
    ladder = study is not None and study.ladder is not None
    columns = differing_keys(
        [run.config for run in runs],
        study.lists if study else None,
        [study.by_run[run.run_id].choices if run.run_id in study.by_run else {} for run in runs] if study else (),
        left_out=RUNG_KEYS if ladder or (study and study.rungs) else (),
    )
    groups = _grouped(runs, columns, notes)
    if study is None:
        groups.sort(key=lambda group: [_order(group[0][key]) for key in columns.keys])
    standing = _standing(runs, study)
    ended = standing is not None and standing.outcome != "continue"
    # A question that has ended waits for none of its runs.
    waited = ("running", "unknown", "preempted") if ended else ()
    at = "end" if ladder and at == "least" else at
    budget = choose_token_budget([run for run in runs if run.state not in waited], at)
    wanted = [(name, None) for name in metrics] or tuple(study.metrics.items() if study else ())
    chosen = choose_metrics(wanted, runs, target)
    names = {run_id: point.variant for run_id, point in study.by_run.items()} if study else {}
    labelled = _label_keys(columns, [values for values, _ in groups], names)
    rows = [
        _row(values, members, columns, chosen, budget=budget, names=names, labelled=labelled)
        for values, members in groups
    ]
    if not wanted:
        chosen = [metric for metric in chosen if any(row.numbers[metric.name] for row in rows)] or chosen[:1]
        # The validation split is the same for all runs, so its loss is less noisy than the training loss.
        validated = all(row.estimates["validation_loss"] for row in rows)
        chosen.sort(key=lambda metric: not validated or metric.name != "validation_loss")
    notes += unequal_tokens(runs, chosen, budget)
    learnt = None
    if study is not None and study.is_adaptive:
        # The best point comes first, as the baseline for the others.
        main = chosen[0]
        metric = study.rounds.get("metric") or main.name
        better = study.rounds.get("better") or main.better or "min"
        rows = [rows[trial.row] for trial in rank(rows, study, metric, better)]
        learnt = learn(rows, columns, study, metric, better)
    reference, why = _baseline(rows, columns, baseline, study)
    # Rows of a ladder have other sizes and lengths, of which the difference to one of them says nothing.
    without = [replace(row, deltas=dict.fromkeys(row.numbers)) for row in rows]
    compared = without if ladder else _with_deltas(rows, reference, chosen)
    key = tuned if tuned is not None else study.tune if study is not None else ""
    tuning = None
    if key and key != "none":
        tuning = tune(compared, columns, chosen[0], budget.tokens, key=key, baseline=reference)
    return Comparison(
        selection.name,
        study,
        budget,
        columns,
        tuple(chosen),
        tuple(compared),
        reference,
        why,
        tuple(notes),
        tuning,
        learnt,
        standing,
        climb(runs, study) if study is not None and ladder else None,
    )


def _standing(runs: Sequence[ComparedRun], study: StudyRecord | None) -> Standing | None:
    """Standing of a registered question at the ends of its runs, whatever the budget of the table."""
    if study is None or study.registered is None:
        return None
    one, found = study.registered, dict[tuple[str, int], PairedRun]()
    for run in runs:
        point = study.by_run.get(run.run_id)
        if point is not None and point.seed is not None:
            found[point.variant, point.seed] = PairedRun(
                run.final(one.metric), run.tokens - run.begins, run.device_seconds
            )
    return standing_of(one, found, study.dropped)


def _without_duplicates(runs: Sequence[ComparedRun], notes: list[str]) -> list[ComparedRun]:
    """Keep the most advanced run of each id, since a copied folder is not a repetition."""
    best: dict[str, ComparedRun] = {}
    for run in runs:
        if run.run_id not in best or run.tokens > best[run.run_id].tokens:
            best[run.run_id] = run
    duplicates = len(runs) - len(best)
    if duplicates:
        copies = "has a copy" if duplicates == 1 else "have copies"
        notes.append(f"{format_items(duplicates, 'run')} {copies} with the same id; the most advanced one counts.")
    return list(best.values())


def _grouped(
    runs: Sequence[ComparedRun], columns: DifferingKeys, notes: list[str]
) -> list[tuple[dict[str, Any], list[ComparedRun]]]:
    groups: dict[str, tuple[dict[str, Any], list[ComparedRun]]] = {}
    for run, names in zip(runs, columns.names, strict=True):
        flat = flatten(run.config)
        every = {**{key: flat.get(key, ABSENT) for key in columns.all_keys}, **names}
        _, members = groups.setdefault(repr(sorted(every.items())), (every, []))
        if any(other.seed == run.seed for other in members):
            reason = "its id differs from another run's, but no key that changes a number does"
            notes.append(f"{run.run_id} is left out: {reason}.")
            continue
        members.append(run)
    for _, members in groups.values():
        members.sort(key=lambda run: _order(run.seed))
    return list(groups.values())


def _order(value: Any) -> tuple[int, float, str]:
    """Sort key: numbers by size, then text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))


def _label_keys(columns: DifferingKeys, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Sequence[str]:
    """Columns of the row label: the keys that the study varies if they distinguish all rows, else all columns. Other
    columns follow from the varied keys: decay steps from steps, a group's keys from its option."""
    varied = {word.partition("=")[0] for name in names.values() for word in name.split()}
    keys = [key for key in columns.keys if columns.short[key] in varied]
    return keys if len({repr([row[key] for key in keys]) for row in rows}) == len(rows) else columns.keys


def _row(
    values: dict[str, Any],
    runs: list[ComparedRun],
    columns: DifferingKeys,
    metrics: Sequence[Metric],
    *,
    budget: TokenBudget,
    names: Mapping[str, str],
    labelled: Sequence[str],
) -> Row:
    numbers: dict[str, dict[object, float]] = {}
    without_speed = all(has_failed(run, budget.tokens) for run in runs)
    for metric in metrics:
        there = [run for run in runs if budget.reached(run) or not metric.needs_point]
        read = {run.seed: metric.read(run, budget.tokens) for run in there}
        known: dict[object, float] = {seed: number for seed, number in read.items() if number is not None}
        numbers[metric.name] = {} if without_speed and metric.is_speed else known
    estimates = {name: estimate(list(finite(found).values())) for name, found in numbers.items()}
    label = columns.label(values, labelled)
    # A named point of a study keeps its name instead of its values.
    given, named = {names.get(run.run_id, "") for run in runs}, False
    if len(given) == 1 and (name := given.pop()):
        axes = {word.partition("=")[0] for word in name.split()}
        named = "=" not in name or not axes <= set(columns.short.values())
        label = name if named else label
    return Row(label or "(nothing differs)", values, tuple(runs), numbers, estimates, {}, named)


def _with_deltas(rows: Sequence[Row], baseline: int, metrics: Sequence[Metric]) -> list[Row]:
    names = [metric.name for metric in metrics]
    deltas = {name: differences([finite(row.numbers[name]) for row in rows], baseline) for name in names}
    return [replace(row, deltas={name: deltas[name][place] for name in names}) for place, row in enumerate(rows)]


def _baseline(
    rows: Sequence[Row], columns: DifferingKeys, requested: str | None, study: StudyRecord | None
) -> tuple[int, str]:
    if requested is not None:
        return _find_row(rows, columns, requested, study), "as requested"
    if study is not None and study.baseline is not None:
        ids = [run_id for run_id, point in study.by_run.items() if point.variant == study.baseline]
        for index, row in enumerate(rows):
            if any(run.run_id in ids for run in row.runs):
                return index, "the study's"
        try:
            return _find_row(rows, columns, study.baseline, study), "the study's"
        except UserError:
            return 0, f"the first row, since the study's ({study.baseline}) has no run"
    adaptive = study is not None and study.is_adaptive
    return 0, f"the {'best point' if adaptive else 'first row'}; --baseline chooses another"


def _find_row(rows: Sequence[Row], columns: DifferingKeys, requested: str, study: StudyRecord | None) -> int:
    named = [run_id for run_id, point in study.by_run.items() if point.variant == requested] if study else []
    exact = [
        index
        for index, row in enumerate(rows)
        if requested == row.label or any(run.run_id in (requested, *named) for run in row.runs)
    ]
    pairs = [word.partition("=") for word in words_of(requested) if "=" in word]
    found = list(exact)
    for index, row in enumerate(rows if pairs and not exact else ()):
        # Columns go by short or full name, other keys by full name.
        values = {**flatten(row.runs[0].config), **{columns.short[key]: row.values[key] for key in columns.keys}}
        if all(name in values and spelled(shown(values[name])) == spelled(text) for name, _, text in pairs):
            found.append(index)
    ids = [[run.run_id for run in row.runs] for row in rows]
    found = found or [index for index, own in enumerate(ids) if any(one.startswith(requested) for one in own)]
    if len(found) == 1:
        return found[0]
    if found:
        matching = "\n".join(f"    {rows[index].label}" for index in found[:20])
        raise UserError(f"baseline={requested}: this matches several rows. Use one of:\n{matching}")
    labels = [row.label for row in rows]
    offer = did_you_mean(requested, labels) or "Use one of:\n" + "\n".join(f"    {label}" for label in labels[:20])
    raise UserError(f"baseline={requested}: this matches no row. {offer}")
