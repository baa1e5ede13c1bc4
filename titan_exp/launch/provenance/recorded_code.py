"""Recorded code of a run: repositories and packages in `code.json`, changed files in `diff.patch`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import read_json

_FILE = re.compile(r'^diff --git "?a/(.+?)"? "?b/', re.MULTILINE)


@dataclass(frozen=True)
class RecordedPart:
    """One repository or package of a run's code."""

    name: str
    version: str | None
    commit: str | None
    branch: str | None
    dirty: bool | None

    def __str__(self) -> str:
        changed = " with uncommitted changes" if self.dirty else ""
        branch = f" ({self.branch})" if self.branch else ""
        state = f"commit {self.commit[:10]}{branch}" if self.commit else f"version {self.version or 'unknown'}"
        return f"{self.name}: {state}{changed}"


@dataclass(frozen=True)
class RecordedCode:
    """Code of a run."""

    parts: tuple[RecordedPart, ...]
    """titan_exp, then the user's repositories and packages."""
    changed: tuple[str, ...]
    """Files that differ from their commits."""


def read_recorded_code(folder: RunFolder) -> RecordedCode:
    """Read the code of a run; without parts if it was not recorded."""
    record = read_json(folder.code)
    try:
        patch = folder.diff.read_text(encoding="utf-8", errors="replace")
    except OSError:
        patch = ""
    parts = [] if record is None else [{"name": "titan_exp", **record}, *record.get("imported", ())]
    return RecordedCode(tuple(map(_part, parts)), tuple(dict.fromkeys(_FILE.findall(patch))))


def _part(record: Mapping[str, Any]) -> RecordedPart:
    return RecordedPart(*(record.get(name) for name in ("name", "version", "commit", "branch", "dirty")))  # type: ignore[arg-type]
