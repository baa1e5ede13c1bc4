"""File source: one document per file, listed once and read on demand."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from titan_exp.data.sources.content import CorpusContent


class FileSource:
    """Random-access source over files, ordered by key.

    `files` are pairs of key (path relative to the corpus) and path. Empty files are skipped. Undecodable bytes become
    U+FFFD; a leading byte-order mark is dropped.
    """

    def __init__(self, name: str, files: Iterable[tuple[str, Path]]) -> None:
        digest, size = blake2b(digest_size=8), 0
        self.content = CorpusContent()
        """Checksum of the files, by `content.fingerprint()`."""
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
