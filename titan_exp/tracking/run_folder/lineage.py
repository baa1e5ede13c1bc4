"""Lineage of a continued run: its parent, and the step at which it begins."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

LINEAGE_FILE = "lineage.json"
"""File name in the run folder."""


@dataclass(frozen=True)
class Lineage:
    """Parent of a run."""

    parent: str
    """Run folder or URL."""
    step: int
    """Step of the parent's checkpoint."""
    tokens: int
    """Tokens that the parent had trained on."""

    @staticmethod
    def read(run_folder: Path) -> "Lineage | None":
        """Lineage of a run; None if it was not continued from another."""
        try:
            return Lineage(**json.loads((run_folder / LINEAGE_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def write(self, run_folder: Path) -> None:
        """Write the file of a run."""
        write_atomically(run_folder / LINEAGE_FILE, json.dumps(asdict(self), indent=1) + "\n")


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """Metric rows of a run, after those of its parents up to the steps at which it and they were continued.

    A parent that is not on this machine has no rows. Raises UserError if a row is damaged.
    """
    rows, seen = read_metrics(run_folder / "metrics.jsonl"), {run_folder}
    lineage = Lineage.read(run_folder)
    while lineage is not None and (parent := Path(lineage.parent)) not in seen and parent.is_dir():
        seen.add(parent)
        step = lineage.step
        rows = [*(row for row in read_metrics(parent / "metrics.jsonl") if (row["step"] or 0) <= step), *rows]
        lineage = Lineage.read(parent)
    return rows
