"""The comparison as one page that needs nothing else: no network, no other file, no library.

The tables are in the page as text and are there without scripts; the plots are drawn by the scripts in `page/` from
numbers that the page carries.
"""

from collections.abc import Sequence
from typing import Any

from titan_exp.compare.compared_metrics import METRICS
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.differing_keys import flatten, value_text
from titan_exp.compare.findings import findings, remarks, stands_for, token_budget_text, verdict
from titan_exp.compare.layout_check import layout_checks
from titan_exp.compare.output.downsample import downsampled_curves
from titan_exp.compare.output.formats import plain
from titan_exp.compare.output.table import MARKS, text_table, title
from titan_exp.compare.stats.format_numbers import short_count
from titan_exp.compare.stats.pareto import loss_metric, pareto
from titan_exp.compare.stats.scaling_efficiency import scaling
from titan_exp.tracking.html import render_page

SCRIPTS = ("frame.js", "curves.js", "bars.js", "dots.js", "tables.js", "start.js")
"""Of the folder `page`, in the order in which they stand in the page."""


def to_html(comparison: Comparison) -> str:
    """The page's text."""
    checks = layout_checks(comparison.runs)
    series = scaling(comparison)
    return render_page(
        "titan_exp.compare.output",
        SCRIPTS,
        plain(_numbers(comparison, series)),
        comparison=comparison,
        table=text_table(comparison),
        title=title,
        marks=MARKS,
        token_budget=token_budget_text(comparison),
        states=_states(comparison),
        findings=_findings(comparison),
        remarks=[*stands_for(comparison), *remarks(comparison, [])],
        checks=checks,
        scaling=series,
        short_count=short_count,
        differing=_differing(comparison),
    )


def _states(comparison: Comparison) -> list[tuple[str, int]]:
    found: dict[str, int] = {}
    for run in comparison.runs:
        found[run.state] = found.get(run.state, 0) + 1
    return sorted(found.items())


def _findings(comparison: Comparison) -> list[tuple[str, str]]:
    """Each sentence with its verdict, which colours it."""
    metric = comparison.main
    told = [verdict(metric, delta) for row in comparison.rows if (delta := row.deltas.get(metric.name)) is not None]
    return list(zip(told, findings(comparison), strict=True))


def _differing(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Every key that differs, those behind another column too, and its value in each row."""
    flat = [flatten(row.runs[0].config) for row in comparison.rows]
    return [
        (key, [value_text(values[key]) if key in values else "not there" for values in flat])
        for key in comparison.differing_keys.all_keys
    ]


def _numbers(comparison: Comparison, series: Sequence[Any]) -> dict[str, Any]:
    """What the script draws."""
    loss = loss_metric(comparison)
    return {
        "rows": [
            {"label": row.label, "baseline": place == comparison.baseline} for place, row in enumerate(comparison.rows)
        ],
        "point": comparison.point.tokens,
        "curves": downsampled_curves(comparison),
        "metrics": [_metric_numbers(comparison, place) for place in range(len(comparison.metrics))],
        "scaling": [
            {
                "kind": it.kind,
                "fixed": it.fixed,
                "points": [
                    {"row": p.row, "label": p.label, "x": p.world_size, "y": p.speedup, "e": p.efficiency}
                    for p in it.points
                ],
            }
            for it in series
        ],
        "pareto": {
            "loss": loss.title if loss else "",
            "cost": next(metric.title for metric in METRICS if metric.name == "gpu_hours"),
            "points": [
                {"row": p.row, "x": p.gpu_hours, "y": p.loss, "front": p.is_on_front} for p in pareto(comparison)
            ],
        },
    }


def _metric_numbers(comparison: Comparison, place: int) -> dict[str, Any]:
    metric = comparison.metrics[place]
    return {
        "name": metric.name,
        "title": title(metric),
        "unit": metric.unit,
        "better": metric.better,
        "values": [
            [found.mean, found.low, found.high] if (found := row.estimates[metric.name]) else None
            for row in comparison.rows
        ],
        "seeds": [list(row.numbers[metric.name].values()) for row in comparison.rows],
        "deltas": [
            [delta.difference, delta.low, delta.high, verdict(metric, delta)]
            if (delta := row.deltas[metric.name]) is not None
            else None
            for row in comparison.rows
        ],
    }
