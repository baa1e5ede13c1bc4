"""Comparison as a self-contained HTML page without external resources.

Tables need no scripts; the scripts in `page/` draw the plots from embedded numbers.
"""

import base64
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from titan_exp.compare.compared_metrics import ABSENT, Metric, value_text
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.efficiency import cost_metric, loss_metric, pareto, scaling
from titan_exp.compare.findings import labelled_findings, layout_checks, remarks, stands_for, token_budget_text, verdict
from titan_exp.compare.output.formats import head, legend, text_table, title
from titan_exp.compare.output.plots import study_plots
from titan_exp.compare.output.study_sections import sections
from titan_exp.compare.runs import ComparedRun
from titan_exp.config.command_line.output import plain
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.tracking.number_format import format_count, format_items, render_page
from titan_exp.tracking.run_folder.metrics_jsonl import column_of, last_fiftieth
from titan_exp.tracking.run_folder.run_folder import RunFolder

POINTS = 120_000
"""Maximum number of points of a page, over all runs."""

MIN_POINTS, MAX_POINTS = 60, 1_000
"""Minimum and maximum number of points of one curve."""


def downsampled_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """Curves of every run that has rows: `loss` and `validation_loss` as [tokens, steps, values, rows of each point].

    A non-finite value is None, which leaves a gap.
    """
    runs = comparison.runs
    most = max(MIN_POINTS, min(MAX_POINTS, POINTS // max(1, len(runs))))
    return [
        {
            "row": index,
            "seed": run.seed,
            "run": run.run_id,
            "loss": downsample(run, "loss", most),
            "validation_loss": downsample(run, "validation_loss", most),
        }
        for index, row in enumerate(comparison.rows)
        for run in row.runs
        if run.rows
    ]


def downsample(run: ComparedRun, key: str, most: int) -> list[list[float | None]]:
    """Average a metric over neighbouring rows to at most `most` points; returns tokens, steps, values and rows per
    point.

    A group with a non-finite value becomes None, so that a divergence stays visible. No group mixes rows of the last 2
    %, whose mean is the run's loss, with other rows.
    """
    known = [
        (float(tokens), float(step or 0), float(value))
        for tokens, step, value in zip(*(column_of(run.rows, name) for name in ("tokens", "step", key)), strict=True)
        if value is not None and tokens is not None
    ]
    size = math.ceil(len(known) / most) or 1
    while len(groups := _groups(known, size)) > most:
        size += 1
    columns: list[list[float | None]] = [[], [], [], []]
    for group in groups:
        tokens, steps, values = zip(*group, strict=True)
        mean = math.fsum(values) / len(group) if all(map(math.isfinite, values)) else None
        columns[0].append(sum(tokens) / len(group))
        columns[1].append(sum(steps) / len(group))
        columns[2].append(None if mean is None else float(f"{mean:.6g}"))
        columns[3].append(len(group))
    return columns


def _groups(rows: list[tuple[float, float, float]], size: int) -> list[list[tuple[float, float, float]]]:
    """Cut rows into groups of up to `size`, one of which begins with the last 2 %."""
    tail = len(rows) - len(last_fiftieth(rows))
    starts = [*range(0, tail, size), *range(tail, len(rows), size)]
    return [rows[start:end] for start, end in pairwise([*starts, len(rows)])]


PICTURES = 12
"""Maximum number of embedded pictures of a kind; one takes about 60 kB."""

SCRIPTS = ("frame.js", "curves.js", "bars.js", "dots.js", "tables.js", "start.js")
"""Scripts of `page/`, in load order."""


def to_html(comparison: Comparison) -> str:
    """Render a comparison as HTML."""
    checks = layout_checks(comparison.runs)
    series, table = scaling(comparison), text_table(comparison)
    return render_page(
        "titan_exp.compare.output",
        SCRIPTS,
        plain(_numbers(comparison, series)),
        comparison=comparison,
        table=table,
        head=head,
        legend=legend(table),
        token_budget=token_budget_text(comparison),
        states=sorted(Counter(run.shown for run in comparison.runs).items()),
        findings=labelled_findings(comparison),
        remarks=[*stands_for(comparison), *remarks(comparison, [])],
        checks=checks,
        scaling=series,
        format_count=format_count,
        items=format_items,
        differing=_differing(comparison),
        sections=sections(comparison),
        plots=[(name, base64.b64encode(picture).decode()) for name, picture in study_plots(comparison)],
        pictures=list(islice(_expert_load(comparison), PICTURES)),
        grids=list(islice(_image_grids(comparison), PICTURES)),
    )


def _expert_load(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Label and PNG in base64 of each row's first run with a record of expert load."""
    for row in comparison.rows:
        recorded = (run for run in row.runs if RunFolder(run.source).expert_load.is_file())
        if (run := next(recorded, None)) is None:
            continue
        from titan_exp.compare.output.plots import expert_load_png

        if (picture := expert_load_png(Path(run.source))) is not None:
            yield row.name_of(run), base64.b64encode(picture).decode()


def _image_grids(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Label and last grid of images (PNG in base64) of each row's first run that has images."""
    for row in comparison.rows:
        found = ((run, sorted(RunFolder(run.source).images.glob("step-*[0-9].png"))) for run in row.runs)
        run, grids = next(((run, grids) for run, grids in found if grids), (None, []))
        if run is not None:
            step = int(grids[-1].stem.removeprefix("step-"))
            yield f"{row.name_of(run)}, step {step}", base64.b64encode(grids[-1].read_bytes()).decode()


def _differing(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """All differing keys with their value in each row, including folded keys."""
    flat = [flatten(row.runs[0].config) for row in comparison.rows]
    return [
        (key, [value_text(values[key]) if key in values else ABSENT for values in flat])
        for key in comparison.differing_keys.all_keys
    ]


def _numbers(comparison: Comparison, series: Sequence[Any]) -> dict[str, Any]:
    """Plot data of the scripts."""
    loss = loss_metric(comparison)
    return {
        "rows": [
            {"label": row.label, "baseline": index == comparison.baseline} for index, row in enumerate(comparison.rows)
        ],
        "point": comparison.budget.tokens,
        "curves": downsampled_curves(comparison),
        "metrics": [_metric_numbers(comparison, metric) for metric in comparison.metrics],
        "scaling": [
            {
                "kind": group.kind,
                "fixed": group.fixed,
                "points": [
                    {"row": p.row, "label": p.label, "x": p.world_size, "y": p.speedup, "e": p.efficiency}
                    for p in group.points
                ],
            }
            for group in series
        ],
        "pareto": {
            "loss": loss.title if loss else "",
            "cost": cost_metric(comparison).title,
            "points": [
                {"row": p.row, "x": p.gpu_hours, "y": p.loss, "front": p.is_on_front} for p in pareto(comparison)
            ],
        },
    }


def _metric_numbers(comparison: Comparison, metric: Metric) -> dict[str, Any]:
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
            [delta.difference, delta.low, delta.high, verdict(metric, delta, comparison.standing)]
            if (delta := row.deltas[metric.name]) is not None
            else None
            for row in comparison.rows
        ],
    }
