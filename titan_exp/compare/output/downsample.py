"""Loss curves downsampled for a page by averaging neighbouring rows."""

import math
from itertools import pairwise
from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.run_record import Run
from titan_exp.tracking.run_folder.final_value import last_fiftieth
from titan_exp.tracking.run_folder.metric_rows import column_of

POINTS = 120_000
"""Maximum number of points of a page, over all runs."""

MIN_POINTS, MAX_POINTS = 60, 1_000
"""Minimum and maximum number of points of one curve."""


def downsampled_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """Curves of every run with rows: `loss` and `validation_loss` as [tokens, steps, values, rows of each point].

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


def downsample(run: Run, key: str, most: int) -> list[list[float | None]]:
    """Tokens, steps and values of a metric, averaged over neighbours to at most `most` points, and the rows of each.

    A group with a non-finite value becomes None, so that a divergence stays visible. No group has rows of the last 2 %,
    whose mean is the run's loss, and others.
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
    """Groups of up to `size` rows, one of which begins with the last 2 %."""
    tail = len(rows) - len(last_fiftieth(rows))
    starts = [*range(0, tail, size), *range(tail, len(rows), size)]
    return [rows[start:end] for start, end in pairwise([*starts, len(rows)])]
