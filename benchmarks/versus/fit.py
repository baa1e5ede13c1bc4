"""Sides of rows that do not fit into the memory of a GPU: ours as planned, torchtitan's as measured."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.versus.cases import case_of
from benchmarks.versus.results import sides_of


def read_planned(path: Path | None) -> dict[str, float]:
    """Planned reserved GiB by row, as `--plan` writes them; empty without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def too_large(rows: Sequence[str], gib: float, planned: Mapping[str, float]) -> dict[tuple[str, str], str]:
    """Rows and sides that are known to need more than `gib`, with a sentence about each."""
    found = {}
    for row in rows:
        ours, theirs = planned.get(row, 0.0), case_of(row).peer_memory or 0.0
        if ours > gib:
            found[row, "ours"] = f"Not run: {row}, ours: it is planned at {ours:.1f} GiB, of {gib:.1f} here."
        if "peer" in sides_of(row) and theirs > gib:
            text = f"it reserved {theirs:.1f} GiB on an H200, of {gib:.1f} here"
            found[row, "peer"] = f"Not run: {row}, torchtitan: {text}."
    return found
