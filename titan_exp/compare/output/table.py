"""The table as text, cell by cell, for whatever draws it."""

from dataclasses import dataclass

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.comparison import Comparison, Row
from titan_exp.compare.differing_keys import value_text
from titan_exp.compare.findings import state_text, verdict
from titan_exp.compare.stats.format_numbers import change, with_interval

MARKS = {"not distinguishable": "n.d.", "only uncorrected": "n.d.*", "no interval": "n = 1", "different": "differs"}
"""Verdicts, short; better and worse are said in full."""


@dataclass(frozen=True)
class Cell:
    """One metric of one row."""

    value: str
    """The mean, with half its interval's width."""
    change: str
    """The difference to the baseline; empty in the baseline's own row."""
    verdict: str
    """What may be said of the difference."""
    mark: str
    """The same, short."""


@dataclass(frozen=True)
class TextRow:
    """One row of the table."""

    keys: tuple[str, ...]
    """Values of the columns that differ."""
    n: int
    """Seeds."""
    state: str
    """Of its runs."""
    cells: tuple[Cell, ...]
    """One for each metric."""
    is_baseline: bool
    """Whether others are compared with it."""


@dataclass(frozen=True)
class TextTable:
    """The table."""

    keys: tuple[str, ...]
    """Short names of the keys that differ."""
    metrics: tuple[Metric, ...]
    """Columns after them."""
    rows: tuple[TextRow, ...]
    """In the order of the comparison."""
    has_seeds: bool
    """Whether any row has more than one run."""
    has_states: bool
    """Whether any run is not done."""


def text_table(comparison: Comparison) -> TextTable:
    """The comparison as text."""
    rows = tuple(_row(comparison, place, row) for place, row in enumerate(comparison.rows))
    names = tuple(comparison.differing_keys.short[key] for key in comparison.differing_keys.keys)
    return TextTable(
        names or ("run",),
        comparison.metrics,
        rows,
        any(row.n > 1 for row in rows),
        any(row.state != "done" for row in rows),
    )


def title(metric: Metric) -> str:
    """The head of a metric's column."""
    unit = "" if metric.unit in ("", "h", "nats") or metric.unit in metric.title else f" ({metric.unit})"
    return f"{metric.title}{unit}"


def _row(comparison: Comparison, place: int, row: Row) -> TextRow:
    keys = tuple(value_text(row.values[key]) for key in comparison.differing_keys.keys) or (row.runs[0].run_id,)
    cells = tuple(_cell(comparison, metric, place, row) for metric in comparison.metrics)
    return TextRow(keys, len(row.runs), state_text(row), cells, place == comparison.baseline)


def _cell(comparison: Comparison, metric: Metric, place: int, row: Row) -> Cell:
    number = with_interval(metric, row.estimates[metric.name])
    if row.estimates[metric.name] is None and row.diverged(metric.name):
        number = "diverged"
    if place == comparison.baseline:
        return Cell(number, "", "", "")
    baseline = comparison.rows[comparison.baseline].estimates[metric.name]
    delta = row.deltas[metric.name]
    told = verdict(metric, delta)
    text = change(metric, delta, baseline.mean if baseline else None) if delta else ""
    return Cell(number, text, told, MARKS.get(told, told))
