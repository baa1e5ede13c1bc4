"""Lineage of a continued run: its parent, and the step at which it begins."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.metric_rows import MetricRows
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.state import read_json

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
        """Lineage of a run; None if it was not continued from another. Raises UserError if the file is damaged."""
        return read_json(run_folder / LINEAGE_FILE, Lineage)

    def write(self, run_folder: Path) -> None:
        """Write the file of a run."""
        write_atomically(run_folder / LINEAGE_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @property
    def name(self) -> str:
        """NAME/ID of the parent, or its URL."""
        return self.parent if "://" in self.parent else "/".join(Path(self.parent).parts[-2:])

    def parent_folder(self, run_folder: Path) -> Path | None:
        """Run folder of the parent, also if both were moved together; None if it is not on this machine."""
        moved = run_folder.absolute().parents[1].joinpath(*Path(self.parent).parts[-2:])
        return next((path for path in (Path(self.parent), moved) if path.is_dir()), None)

    def __str__(self) -> str:
        return f"{self.name} after step {self.step}"


@dataclass(frozen=True)
class Ancestor:
    """Run from which another was continued, directly or not."""

    lineage: Lineage
    """Lineage of its child, which names it."""
    folder: Path | None
    """Run folder; None if it is not on this machine."""


def ancestors(run_folder: Path) -> Iterator[Ancestor]:
    """Parent of a run, the parent's parent, and so on to the last that is on this machine."""
    folder, seen = run_folder, {run_folder.resolve()}
    while (lineage := Lineage.read(folder)) is not None:
        parent = lineage.parent_folder(folder)
        if parent is not None and parent.resolve() in seen:
            return
        yield Ancestor(lineage, parent)
        if parent is None:
            return
        seen.add(parent.resolve())
        folder = parent


def children(run_folder: Path) -> list[tuple[Path, Lineage]]:
    """Run folders beside a run, in any group, that were continued from it."""
    found = []
    for path in sorted(run_folder.absolute().parents[1].glob(f"*/[!.]*/{LINEAGE_FILE}")):
        with suppress(UserError, OSError):  # damaged, which `show` of that run explains, or closed to this user
            lineage = Lineage.read(path.parent)
            parent = None if lineage is None else lineage.parent_folder(path.parent)
            if lineage is not None and parent is not None and parent.resolve() == run_folder.resolve():
                found.append((path.parent, lineage))
    return found


def read_history(run_folder: Path, file: str = "metrics.jsonl") -> MetricRows:
    """Rows of a run's metrics, after those of its parents up to the steps at which it and they were continued.

    `file` may be another file of such rows. A parent that is not on this machine has no rows. Raises UserError if a row
    is damaged.
    """
    rows = read_metrics(run_folder / file)
    for ancestor in ancestors(run_folder):
        if ancestor.folder is not None:
            step = ancestor.lineage.step
            earlier = read_metrics(ancestor.folder / file)
            rows = MetricRows(chain((row for row in earlier if row["step"] <= step), rows))
    return rows
