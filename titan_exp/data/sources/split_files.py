"""Split-file source: paragraphs or lines of files as documents, indexed by one scan and read on demand."""

import os
import weakref
from array import array
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.data_files import SPLIT_FURTHER
from titan_exp.data.sources.text_files import FileSource

_OPEN_FILES = 32
Granularity = Literal["paragraph", "line"]
"""Unit of text per document."""


class SplitFileSource:
    """Random-access source over paragraphs or lines, in file order.

    Whitespace-only lines separate paragraphs and are not documents. Trailing whitespace of a document is dropped.
    Splitting at ASCII newlines never cuts a UTF-8 character. The index takes 8 bytes per document. Files must not
    change while in use. Raises UserError if all files are blank.
    """

    def __init__(self, files: FileSource, unit: Granularity) -> None:
        self._files, self.content = files, files.content
        offsets = [_document_offsets(files.path(number), unit) for number in range(len(files))]
        self._offsets = np.concatenate([np.empty(0, dtype=np.int64), *offsets])
        if len(self._offsets) == 0:
            reason = "all files of data.paths are blank"
            raise UserError("There is no text to read.", [Violation("data.document", unit, reason, "files with text")])
        self._first_document: list[int] = np.cumsum([0, *map(len, offsets)]).tolist()
        self._open = lru_cache(maxsize=_OPEN_FILES)(lambda number: _OpenFile(files.path(number)))
        self.fingerprint = f"{files.fingerprint}, {len(self)} documents, each a {unit}"
        """Identity of the files and of their split."""
        self.split_further = SPLIT_FURTHER[unit]
        """Setting that splits the same text into more documents, if any."""

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> str:
        number = self._file_of(index)
        within = index + 1 < self._first_document[number + 1]
        text = self._open(number).read(int(self._offsets[index]), int(self._offsets[index + 1]) if within else None)
        return text.rstrip().decode("utf-8-sig", errors="replace")

    def key(self, index: int) -> str:
        """Key of the file and index of the document within it."""
        number = self._file_of(index)
        return f"{self._files.key(number)}#{index - self._first_document[number]}"

    def _file_of(self, index: int) -> int:
        return bisect_right(self._first_document, index) - 1


class _OpenFile:
    """File kept open between reads, since opening is much slower than reading on network file systems."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, begin: int, end: int | None) -> bytes:
        """Bytes [begin, end) (None: end of file). Thread-safe."""
        if end is None:
            end = os.fstat(self._descriptor).st_size
        chunks = []
        while begin < end and (chunk := os.pread(self._descriptor, end - begin, begin)):
            chunks.append(chunk)
            begin += len(chunk)
        return b"".join(chunks)


def _document_offsets(path: Path, unit: Granularity) -> np.ndarray:
    """Byte offsets of a file's documents, int64 [documents]; one line is in memory at a time."""
    offsets, offset, follows_text = array("q"), 0, False
    with path.open("rb") as file:
        for line in file:
            is_text = not line.isspace()
            if is_text and not (unit == "paragraph" and follows_text):
                offsets.append(offset)
            follows_text = is_text
            offset += len(line)
    return np.frombuffer(offsets, dtype=np.int64)
