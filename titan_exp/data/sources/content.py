"""Content checksum of a corpus of files: of every byte, or of evenly spaced samples if the corpus is large.

Names and sizes of all files count in either case. The checksum does not depend on the corpus's location or on
modification times, and is cached in the user's cache folder until a file changes.
"""

import contextlib
import hashlib
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from titan_exp.config.paths.user_folder import user_folder

WHOLE_BYTES, WHOLE_FILES = 256 * 2**20, 20_000
"""Maximum size and number of files of a corpus that is read completely; a larger one is sampled."""
SAMPLES, SAMPLE_BYTES = 512, 2**16
"""Number and size of the samples, spaced evenly over the concatenated files; the first and last bytes are among
them."""
SETTLED = 2.0
"""Seconds without a change after which a checksum is cached: a write within a tick of the clock keeps the times."""


class CorpusContent:
    """Files of a corpus, in order."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._paths: list[Path] = []
        self._ends = [0]
        self._stamp = blake2b(f"{WHOLE_BYTES} {WHOLE_FILES} {SAMPLES} {SAMPLE_BYTES}".encode(), digest_size=16)
        self._changed = 0.0
        self.modified = 0.0
        """Newest modification time of a file, in Unix time."""

    def add(self, key: str, path: Path, stat: os.stat_result) -> None:
        """Append a file; `key` is its path relative to the corpus."""
        self._keys.append(key)
        self._paths.append(path)
        self._ends.append(self._ends[-1] + stat.st_size)
        self.modified = max(self.modified, stat.st_mtime)
        self._changed = max(self._changed, stat.st_mtime, stat.st_ctime)
        identity = (key, os.path.abspath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        self._stamp.update(repr(identity).encode(errors="surrogateescape"))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self._ends[-1]

    @property
    def stamp(self) -> str:
        """Digest of places, sizes, times and inodes of the files, which any change of a file changes too."""
        return self._stamp.hexdigest()

    @property
    def is_sampled(self) -> bool:
        """True if the corpus is too large to be read completely."""
        return self.size > WHOLE_BYTES or len(self._paths) > WHOLE_FILES

    def fingerprint(self) -> str:
        """Numbers of files and bytes, and the checksum."""
        with contextlib.suppress(OSError):
            return self._cache_file().read_text(encoding="utf-8")
        settled = time.time() - self._changed > SETTLED
        kind = f"{SAMPLES} samples" if self.is_sampled else "content"
        count = f"{len(self._paths)} file{'s' * (len(self._paths) != 1)}"
        text = f"{count}, {self._ends[-1]} bytes, {kind} {self._checksum()}"
        if settled:
            with contextlib.suppress(OSError):  # no home folder, or a full disk
                cached = self._cache_file()
                cached.parent.mkdir(parents=True, exist_ok=True)
                temporary = cached.with_suffix(f".{os.getpid()}.tmp")
                temporary.write_text(text, encoding="utf-8")
                os.replace(temporary, cached)
        return text

    def _cache_file(self) -> Path:
        return user_folder("XDG_CACHE_HOME", ".cache") / "corpora" / self.stamp

    def _checksum(self) -> str:
        digest = blake2b(digest_size=16)
        for key, begin, end in zip(self._keys, self._ends, self._ends[1:], strict=False):
            digest.update(f"{key}\0{end - begin}\0".encode(errors="surrogateescape"))
        if self.is_sampled:
            for offset in _spaced(self._ends[-1]):
                number = bisect_right(self._ends, offset) - 1
                with self._paths[number].open("rb", buffering=0) as file:
                    file.seek(offset - self._ends[number])
                    digest.update(file.read(SAMPLE_BYTES))
        else:
            for path in self._paths:
                with path.open("rb") as file:
                    hashlib.file_digest(file, lambda: digest)
        return digest.hexdigest()


def _spaced(total: int) -> Sequence[int]:
    """Offsets of the samples; duplicates in a small corpus of many files are left out."""
    last = max(0, total - SAMPLE_BYTES)
    return sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)})
