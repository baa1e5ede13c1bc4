"""Loss curves small enough to travel in a page: neighbouring rows are averaged where there are very many."""

import math
from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.run_record import Run

POINTS = 120_000
"""Points that a page carries at most, over all runs."""

LEAST, MOST = 60, 1_000
"""Points of one run."""


def downsampled_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """For each run with rows: the place of its row, seed, id; `loss` and `validation_loss` as [tokens, steps, values].

    A value is None where it is not finite, which leaves a gap.
    """
    runs = comparison.runs
    most = max(LEAST, min(MOST, POINTS // max(1, len(runs))))
    return [
        {
            "row": place,
            "seed": run.seed,
            "run": run.run_id,
            "loss": downsample(run, "loss", most),
            "validation_loss": downsample(run, "validation_loss", most),
        }
        for place, row in enumerate(comparison.rows)
        for run in row.runs
        if run.rows
    ]


def downsample(run: Run, key: str, most: int) -> list[list[float | None]]:
    """Tokens, steps and values of a metric, at most `most` of each: means over as many neighbours as it takes.

    A group that holds a value that is not finite is not finite, so no divergence is averaged away.
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
        mean = math.fsum(value for _, _, value in group) / len(group) if all(_finite(it) for it in group) else None
        columns[0].append(group[-1][0] if size == 1 else sum(it[0] for it in group) / len(group))
        columns[1].append(group[-1][1] if size == 1 else sum(it[1] for it in group) / len(group))
        columns[2].append(None if mean is None else float(f"{mean:.6g}"))
    return columns


def _finite(entry: tuple[float, float, float]) -> bool:
    return math.isfinite(entry[2])
