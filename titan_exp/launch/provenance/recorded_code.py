"""Recorded code of a run: repositories and packages in `code.json`, changed files in `diff.patch`."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import read_text
from titan_exp.launch.provenance.provenance import IMPORTED
from titan_exp.tracking.run_folder.provenance_records import read_code
from titan_exp.tracking.run_folder.run_folder import RunFolder

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
        return f"{self.name}: {recorded_version(vars(self))}{f' ({self.branch})' if self.branch else ''}"


@dataclass(frozen=True)
class RecordedCode:
    """Code of a run."""

    parts: tuple[RecordedPart, ...]
    """titan_exp, then the user's repositories and packages."""
    changed: tuple[str, ...]
    """Files that differ from their commits."""


def read_recorded_code(folder: RunFolder) -> RecordedCode:
    """Read the code of a run; without parts if it was not recorded."""
    record = read_code(folder.code)
    patch = ""
    with suppress(FileNotFoundError, UserError):
        patch = read_text(folder.diff)
    parts = [
        RecordedPart(name, *(part.get(field) for field in ("version", "commit", "branch", "dirty")))
        for name, part in ({} if record is None else recorded_parts(record)).items()
    ]
    return RecordedCode(tuple(parts), tuple(dict.fromkeys(_FILE.findall(patch))))


def recorded_parts(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Repositories and packages of a code record (`code.json`) by name: titan_exp, then the user's."""
    return {"titan_exp": record, **{part["name"]: part for part in record.get(IMPORTED, ())}}


def recorded_version(part: Mapping[str, Any]) -> str:
    """Commit of a repository, or version of a package, as text."""
    if part.get("commit"):
        return f"commit {part['commit'][:10]}{' with uncommitted changes' if part.get('dirty') else ''}"
    return f"version {part['version']}" if part.get("version") else "no commit"
