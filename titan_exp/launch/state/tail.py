"""File tail: complete lines as other processes append them."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import FILE_BYTES, open_file

_COLOUR = re.compile("\x1b\\[[0-9;]*m")
LAST_BYTES = 2**18
"""Bytes in which the last lines of a log are looked for."""


class FileTail:
    """Lines appended to a file, which may not exist yet; `from_now` skips existing lines, and `most` all but the last
    bytes."""

    def __init__(self, path: Path, *, from_now: bool = False, most: int | None = None) -> None:
        self._path, self._offset = path, 0
        if most is not None:
            with suppress(FileNotFoundError), open_file(path) as file:
                self._offset = max(0, file.seek(0, os.SEEK_END) - most)
        if from_now:
            # A torn last line will be truncated and overwritten.
            with suppress(FileNotFoundError), open_file(path) as file:
                begin = max(0, file.seek(0, os.SEEK_END) - FILE_BYTES)
                file.seek(begin)
                self._offset = begin + file.read().rfind(b"\n") + 1

    @property
    def skipped(self) -> int:
        """Bytes before the next line."""
        return self._offset

    def lines(self, *, torn: bool = False) -> Iterator[str]:
        """Complete lines appended since the last call, and with `torn` an incomplete one at the end. Raises UserError
        if something else is in the file's place."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return
        with file:
            while True:
                file.seek(self._offset)
                text = file.read(FILE_BYTES)
                end = text.rfind(b"\n") + 1
                if not end and (torn or len(text) == FILE_BYTES):
                    end = len(text)
                if not end:
                    return
                self._offset += end
                yield from _text(text[:end]).splitlines()


def last_lines(log: Path, most: int) -> list[str]:
    """Last lines of a log; none if it is missing or cannot be read."""
    try:
        with open_file(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return _text(file.read()).splitlines()[-most:]
    except (OSError, UserError):
        return []


def _text(log: bytes) -> str:
    """Text of a log, in which other libraries may have coloured words."""
    return _COLOUR.sub("", log.decode(errors="replace"))
