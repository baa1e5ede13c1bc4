"""Source `text`: the user's files, folders (recursive, without hidden entries) and globs."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.config.errors.did_you_mean import listed
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.data.data_warning import warn
from titan_exp.data.sources.text_files import FileSource

if TYPE_CHECKING:
    from titan_exp.data.sources.split_files import SplitFileSource

_BINARY_CHECK_BYTES = 8192
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

    split_further = "data.document=paragraph"
    """Setting that splits the same text into more documents."""

    def __init__(self, paths: Sequence[str]) -> None:
        if not paths:
            raise _refusal(paths, "no file is given", "data.paths='[notes,books/*.txt]'")
        found: dict[Path, str] = {}
        for entry in paths:
            matches = list(matching_files(entry))
            if not matches:
                raise _refusal(
                    entry, f"it matches no file (working directory {Path.cwd()})", "an existing file, folder or glob"
                )
            for key, path in matches:
                found.setdefault(path.resolve(), key)
        texts = {path: key for path, key in found.items() if not _is_binary(path)}
        if len(texts) < len(found):
            skipped = sorted(str(path) for path in found if path not in texts)
            more = [f"{len(skipped) - _NAMED} more"] if len(skipped) > _NAMED else []
            named = listed([*skipped[:_NAMED], *more], "and")
            count = f"{len(skipped)} binary file{'s' * (len(skipped) != 1)} of {len(found)} files"
            warn(f"data.paths: skipped {count}, {named}; a narrower glob excludes them")
        super().__init__("text", ((key, path) for path, key in texts.items()))
        if len(self) == 0:
            raise _refusal(list(paths), "no file there contains text", "text files")


def matching_files(entry: str) -> Iterator[tuple[str, Path]]:
    """Pairs of key and path; keys are relative to the entry's fixed part, so that moving a corpus keeps its keys."""
    path = Path(entry).expanduser()
    if path.is_dir():
        yield from _walk(path, path)
    elif path.is_file():
        yield path.name, path
    else:
        fixed = Path(*_fixed_parts(path.parts))
        for match in map(Path, glob.glob(str(path), recursive=True)):
            if match.is_file():
                yield match.relative_to(fixed).as_posix(), match


def _walk(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _fixed_parts(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_BINARY_CHECK_BYTES)


def _refusal(value: object, reason: str, remedy: str) -> UserError:
    return UserError("There is no text to read.", [Violation("data.paths", value, reason, remedy)])
