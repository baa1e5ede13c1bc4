"""Comparison table as text cells, shared by all outputs."""

from dataclasses import dataclass

from titan_exp.compare.compared_metrics import Metric
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.differing_keys import value_text
from titan_exp.compare.findings import state_text, verdict
from titan_exp.compare.row import Row
from titan_exp.compare.stats.format_numbers import change, with_interval

MARKS = {"not distinguishable": "n.d.", "only uncorrected": "n.d.*", "no interval": "n = 1", "different": "differs"}
"""Abbreviated significance labels; `better` and `worse` are not abbreviated."""


@dataclass(frozen=True)
class Cell:
    """One metric of one row."""

    value: str
    """Mean ± half-width of its interval."""
    change: str
    """Difference to the baseline; empty in the baseline's row."""
    verdict: str
    mark: str


@dataclass(frozen=True)
class TextRow:
    """One row of the text table."""

    keys: tuple[str, ...]
    """Values of the differing keys."""
    n: int
    state: str
    cells: tuple[Cell, ...]
    """One per metric."""
    is_baseline: bool


@dataclass(frozen=True)
class TextTable:
    """Text of the comparison table."""

    keys: tuple[str, ...]
    """Short names of the differing keys."""
    metrics: tuple[Metric, ...]
    """Metrics of the other columns."""
    rows: tuple[TextRow, ...]
    has_seeds: bool
    """True if a row has more than one run."""
    has_states: bool
    """True if a run is not done."""


def text_table(comparison: Comparison) -> TextTable:
    """Build the text table of a comparison."""
    rows = tuple(_row(comparison, index, row) for index, row in enumerate(comparison.rows))
    names = tuple(comparison.differing_keys.short[key] for key in comparison.differing_keys.keys)
    return TextTable(
        names or ("run",),
        comparison.metrics,
        rows,
        any(row.n > 1 for row in rows),
        any(row.state != "done" for row in rows),
    )


def title(metric: Metric) -> str:
    """Column heading of a metric."""
    unit = "" if metric.unit in ("", "h", "nats") or metric.unit in metric.title else f" ({metric.unit})"
    return f"{metric.title}{unit}"


def _row(comparison: Comparison, index: int, row: Row) -> TextRow:
    keys = tuple(value_text(row.values[key]) for key in comparison.differing_keys.keys) or (row.runs[0].run_id,)
    cells = tuple(_cell(comparison, metric, index, row) for metric in comparison.metrics)
    return TextRow(keys, len(row.runs), state_text(row), cells, index == comparison.baseline)


def _cell(comparison: Comparison, metric: Metric, index: int, row: Row) -> Cell:
    number = with_interval(metric, row.estimates[metric.name])
    if row.estimates[metric.name] is None and row.diverged(metric.name):
        number = "diverged"
    if index == comparison.baseline:
        return Cell(number, "", "", "")
    baseline = comparison.rows[comparison.baseline].estimates[metric.name]
    delta = row.deltas[metric.name]
    result = verdict(metric, delta)
    text = change(metric, delta, baseline.mean if baseline else None) if delta else ""
    return Cell(number, text, result, MARKS.get(result, result))
