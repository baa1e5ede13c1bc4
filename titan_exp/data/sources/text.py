"""Source `text`: the user's files, folders (recursive, without hidden entries) and globs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import SPLIT_FURTHER, distinct_files, is_binary, matching_files
from titan_exp.config.schema.builtins import SourceDescription
from titan_exp.data.data_warning import warn
from titan_exp.data.sources.text_files import FileSource

if TYPE_CHECKING:
    from titan_exp.data.sources.split_files import SplitFileSource

DESCRIPTION = SourceDescription(reads=("paths", "document"))

_NAMED = 5
"""Skipped files that are named."""


def build(config: DataConfig) -> "TextSource | SplitFileSource":
    """Open the files of `data.paths`, split by `data.document`."""
    files = open_files(config)
    if config.document == "file":
        return files
    from titan_exp.data.sources.split_files import SplitFileSource  # imports numpy

    return SplitFileSource(files, config.document)


def open_files(config: DataConfig) -> "TextSource":
    """List the files of `data.paths`."""
    return TextSource(config.paths)


class TextSource(FileSource):
    """One document per file. Files with a NUL byte near their start are binary and skipped. Raises UserError if an
    entry of `paths` matches nothing, or no text is left."""

    split_further = SPLIT_FURTHER["file"]
    """Setting that splits the same text into more documents."""

    def __init__(self, paths: Sequence[str]) -> None:
        if not paths:
            raise _refusal(paths, "no file is given", "data.paths='[notes,books/*.txt]'")
        for entry in paths:
            if next(matching_files(entry), None) is None:
                reason = f"it matches no file (working directory {Path.cwd()})"
                raise _refusal(entry, reason, "an existing file, folder or glob")
        found = distinct_files(paths)
        texts = {path: key for path, key in found.items() if not is_binary(path)}
        if len(texts) < len(found):
            skipped = sorted(str(path) for path in found if path not in texts)
            more = [f"{len(skipped) - _NAMED} more"] if len(skipped) > _NAMED else []
            named = listed([*skipped[:_NAMED], *more], "and")
            count = f"{len(skipped)} binary file{'s' * (len(skipped) != 1)} of {len(found)} files"
            warn(f"data.paths: skipped {count}, {named}; a narrower glob excludes them")
        super().__init__("text", ((key, path) for path, key in texts.items()))
        if len(self) == 0:
            raise _refusal(list(paths), "no file there contains text", "text files")


def _refusal(value: object, reason: str, remedy: str) -> UserError:
    return UserError("There is no text to read.", [Violation("data.paths", value, reason, remedy)])
