"""Source `text`: your files, folders (recursive, without hidden entries) and globs."""

import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan_exp.config.data_files import SPLIT_FURTHER, distinct_files, is_binary, matching_files
from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.foreign_code import SourceDescription
from titan_exp.data.sources.base import CorpusContent, warn

if TYPE_CHECKING:
    import numpy as np

DESCRIPTION = SourceDescription(reads=("paths", "document"), files="paths")


class FileSource:
    """Random-access source over files, ordered by key. `files` are pairs of key (path relative to the corpus) and path.
    Empty files are skipped. Undecodable bytes become U+FFFD; a leading byte-order mark is dropped."""

    def __init__(self, name: str, files: Iterable[tuple[str, Path]]) -> None:
        digest, size = blake2b(digest_size=8), 0
        self.content = CorpusContent()
        """Checksum of the files; see `content.fingerprint()`."""
        self._keys: list[str] = []
        self._paths: list[Path] = []
        for key, path in sorted(files):
            stat = path.stat()
            length = stat.st_size
            if length == 0:
                continue
            self.content.add(key, path, stat)
            self._keys.append(key)
            self._paths.append(path)
            digest.update(f"{key}\0{length}\0".encode("utf-8", errors="surrogateescape"))
            size += length
        self.fingerprint = f"{name}: {len(self._keys)} files, {size} bytes, {digest.hexdigest()}"
        """Identity of the files' keys and sizes; unaffected by moving or touching the corpus."""

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        return self._paths[index].read_bytes().decode("utf-8-sig", errors="replace")

    def key(self, index: int) -> str:
        """Path of the file relative to the corpus."""
        return self._keys[index]

    def path(self, index: int) -> Path:
        """Path of the file on this machine."""
        return self._paths[index]


_OPEN_FILES = 32
Granularity = Literal["paragraph", "line"]  # unit of text per document


class SplitFileSource:
    """Random-access source over paragraphs or lines, in file order. Whitespace-only lines separate paragraphs and are
    not documents. Trailing whitespace of a document is dropped. Splitting at ASCII newlines never cuts a UTF-8
    character. The index takes 8 bytes per document. Files must not change while in use. Raises UserError if all files
    are blank."""

    def __init__(self, files: FileSource, unit: Granularity) -> None:
        self._files, self.content = files, files.content
        offsets = [_document_offsets(files.path(number), unit) for number in range(len(files))]
        import numpy as np

        self._offsets = np.concatenate([np.empty(0, dtype=np.int64), *offsets])
        if len(self._offsets) == 0:
            violation = Violation("data.document", unit, "all files of data.paths are blank", "give files with text")
            raise UserError("There is no text to read.", [violation])
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


def _document_offsets(path: Path, unit: Granularity) -> "np.ndarray":
    """Byte offsets of a file's documents, int64 [documents]; one line is in memory at a time."""
    offsets, offset, follows_text = array("q"), 0, False
    with path.open("rb") as file:
        for line in file:
            is_text = not line.isspace()
            if is_text and not (unit == "paragraph" and follows_text):
                offsets.append(offset)
            follows_text = is_text
            offset += len(line)
    import numpy as np  # rules use this module, and refusals must not import NumPy

    return np.frombuffer(offsets, dtype=np.int64)


_NAMED = 5  # number of skipped files that a warning names


def build(config: DataConfig) -> "TextSource | SplitFileSource":
    """Open the files of `data.paths`, split by `data.document`."""
    files = open_files(config)
    return files if config.document == "file" else SplitFileSource(files, config.document)


def open_files(config: DataConfig) -> "TextSource":
    """List the files of `data.paths`."""
    return TextSource(config.paths)


class TextSource(FileSource):
    """One document per file. Files with a NUL byte near their start are binary and skipped. Raises UserError if an
    entry of `paths` matches nothing, or no text is left."""

    split_further = SPLIT_FURTHER["file"]  # setting that splits the same text into more documents

    def __init__(self, paths: Sequence[str]) -> None:
        if not paths:
            raise _refusal(paths, "you gave no file", "data.paths='[notes,books/*.txt]'")
        for entry in paths:
            if next(matching_files(entry), None) is None:
                reason = f"this matches no file (the current folder is {Path.cwd()})"
                raise _refusal(entry, reason, "give a file, a folder or a glob that exists")
        found = distinct_files(paths)
        texts = {path: key for path, key in found.items() if not is_binary(path)}
        if len(texts) < len(found):
            skipped = sorted(str(path) for path in found if path not in texts)
            more = [f"{len(skipped) - _NAMED} more"] if len(skipped) > _NAMED else []
            named = listed([*skipped[:_NAMED], *more], "and")
            count = f"{len(skipped)} binary file{'s' * (len(skipped) != 1)} of {len(found)} files"
            warn(f"data.paths: skipped {count}, {named}. To leave them out, use a narrower glob")
        super().__init__("text", ((key, path) for path, key in texts.items()))
        if len(self) == 0:
            raise _refusal(list(paths), "none of these files contains text", "give text files")


def _refusal(value: object, reason: str, remedy: str) -> UserError:
    return UserError("There is no text to read.", [Violation("data.paths", value, reason, remedy)])
