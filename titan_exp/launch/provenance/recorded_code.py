"""Recorded code of a run: repositories and packages in `code.json`, changed files in `diff.patch`."""

import re
from contextlib import suppress
from dataclasses import dataclass, fields

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import read_text
from titan_exp.tracking.run_folder.provenance_records import CodePart, read_code
from titan_exp.tracking.run_folder.run_folder import RunFolder

_FILE = re.compile(r'^diff --git "?a/(.+?)"? "?b/', re.MULTILINE)


@dataclass(frozen=True)
class RecordedCode:
    """Code of a run."""

    parts: tuple[CodePart, ...]
    """titan_exp, then the user's repositories and packages."""
    changed: tuple[str, ...]
    """Files that differ from their commits."""


def read_recorded_code(folder: RunFolder) -> RecordedCode:
    """Read the code of a run; without parts if it was not recorded."""
    record, patch = read_code(folder.code), ""
    with suppress(FileNotFoundError, UserError):
        patch = read_text(folder.diff)
    names = [each.name for each in fields(CodePart)]
    parts = [CodePart(*(getattr(part, name) for name in names)) for part in (record.parts if record else ())]
    return RecordedCode(tuple(parts), tuple(dict.fromkeys(_FILE.findall(patch))))
