"""Documents that are files: listed once, read on demand, so that a corpus larger than memory costs only its paths."""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path


class FileSource:
    """Random access to files, in the order of their keys.

    `files` are pairs of a key, the file's place within the corpus wherever the corpus lies, and its path. Empty files
    are left out. Undecodable bytes become U+FFFD; a leading byte-order mark is dropped.
    """

    def __init__(self, name: str, files: Iterable[tuple[str, Path]]) -> None:
        digest, size = blake2b(digest_size=8), 0
        self._keys: list[str] = []
        self._paths: list[Path] = []
        for key, path in sorted(files):
            length = path.stat().st_size
            if length == 0:
                continue
            self._keys.append(key)
            self._paths.append(path)
            digest.update(f"{key}\0{length}\0".encode("utf-8", errors="surrogateescape"))
            size += length
        self.fingerprint = f"{name}: {len(self._keys)} files, {size} bytes, {digest.hexdigest()}"
        """Changes with the set of files and with their sizes; not when the corpus is moved or touched."""

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        return self._paths[index].read_bytes().decode("utf-8-sig", errors="replace")

    def key(self, index: int) -> str:
        """The file's place within the corpus."""
        return self._keys[index]

    def path(self, index: int) -> Path:
        """Where the file lies on this machine."""
        return self._paths[index]
