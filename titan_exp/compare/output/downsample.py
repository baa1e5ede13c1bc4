"""Loss curves downsampled for a page by averaging neighbouring rows."""

import math
from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.run_record import Run

POINTS = 120_000
"""Maximum number of points of a page, over all runs."""

MIN_POINTS, MAX_POINTS = 60, 1_000
"""Minimum and maximum number of points of one curve."""


def downsampled_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """Curves of every run with rows: `loss` and `validation_loss` as [tokens, steps, values].

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
    """Tokens, steps and values of a metric, averaged over neighbours to at most `most` points.

    A group with a non-finite value becomes None, so that a divergence stays visible.
    """
    known = [
        (float(row["tokens"] or 0), float(row["step"] or 0), float(value))
        for row in run.rows
        if (value := row.get(key)) is not None and row.get("tokens") is not None
    ]
    size = math.ceil(len(known) / most) or 1
    groups = [known[start : start + size] for start in range(0, len(known), size)]
    columns: list[list[float | None]] = [[], [], []]
    for group in groups:
        tokens, steps, values = zip(*group, strict=True)
        mean = math.fsum(values) / len(group) if all(map(math.isfinite, values)) else None
        columns[0].append(sum(tokens) / len(group))
        columns[1].append(sum(steps) / len(group))
        columns[2].append(None if mean is None else float(f"{mean:.6g}"))
    return columns
