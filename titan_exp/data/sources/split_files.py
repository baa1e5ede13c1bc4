"""Documents that are parts of files: paragraphs or lines. One scan notes where each begins; each is read on demand."""

import os
import weakref
from array import array
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.data.sources.text_files import FileSource

_OPEN_FILES = 32
Granularity = Literal["paragraph", "line"]


class SplitFileSource:
    """Random access to the parts of files, in the files' order and in their order within a file.

    Lines of nothing but white space are blank: they are no documents, and they separate paragraphs. White space that
    ends a document is dropped. Newlines are ASCII, so no character of UTF-8 is ever cut. A document costs 8 bytes of
    memory. Files must not change while they are in use. Raises UserError where all of them are blank.
    """

    def __init__(self, files: FileSource, part: Granularity) -> None:
        self._files = files
        begins = [_begins(files.path(number), part) for number in range(len(files))]
        self._begins = np.concatenate([np.empty(0, dtype=np.int64), *begins])
        if len(self._begins) == 0:
            reason = "the files of data.paths are blank from beginning to end"
            raise UserError("There is no text to read.", [Violation("data.document", part, reason, "files of text")])
        self._firsts: list[int] = np.cumsum([0, *map(len, begins)]).tolist()
        self._open = lru_cache(maxsize=_OPEN_FILES)(lambda number: _OpenFile(files.path(number)))
        self.fingerprint = f"{files.fingerprint}, {len(self)} documents, each a {part}"
        """Changes with that of the files, and with how they are divided."""
        self.finer = "data.document=line" if part == "paragraph" else None
        """What would make more documents of the same text; None where nothing would."""

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> str:
        number = self._file_of(index)
        within = index + 1 < self._firsts[number + 1]
        text = self._open(number).read(int(self._begins[index]), int(self._begins[index + 1]) if within else None)
        return text.rstrip().decode("utf-8-sig", errors="replace")

    def key(self, index: int) -> str:
        """The file's key and the document's number within the file, from 0."""
        number = self._file_of(index)
        return f"{self._files.key(number)}#{index - self._firsts[number]}"

    def _file_of(self, index: int) -> int:
        return bisect_right(self._firsts, index) - 1


class _OpenFile:
    """A file that stays open while it is in use: on a network file system, opening takes far longer than reading."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, end: int | None) -> bytes:
        """The bytes from `begin` to `end` (None: the file's). For any number of threads at once."""
        if end is None:
            end = os.fstat(self._descriptor).st_size
        pieces = []
        while begin < end and (piece := os.pread(self._descriptor, end - begin, begin)):
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)


def _begins(path: Path, part: Granularity) -> np.ndarray:
    """Where the documents of a file begin, in bytes, int64 [documents]; one line is in memory at a time."""
    begins, offset, follows_text = array("q"), 0, False
    with path.open("rb") as file:
        for line in file:
            is_text = not line.isspace()
            if is_text and not (part == "paragraph" and follows_text):
                begins.append(offset)
            follows_text = is_text
            offset += len(line)
    return np.frombuffer(begins, dtype=np.int64)
