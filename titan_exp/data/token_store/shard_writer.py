"""Shard writer: the tokens and document index of a shard, with checksums, written atomically."""

import contextlib
import json
import os
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.paths.token_store_manifest import BEGIN_BYTES

TEMPORARY_SUFFIX = ".part"
"""Suffix of a file during writing."""
_BUFFER_BYTES = 1 << 20


def checksum() -> Any:
    """New hasher for a store's files, about 1 GB/s."""
    return blake2b(digest_size=16)


def write_json(path: Path, values: Any) -> None:
    """Write `values` as JSON, atomically."""
    file = AtomicFile(path)
    try:
        file.write(json.dumps(values, indent=1).encode() + b"\n")
        file.commit()
    except BaseException:
        file.discard()
        raise


class AtomicFile:
    """File written under a temporary name; `commit` syncs it to disk and renames it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A process whose parent was killed may briefly write the same file.
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        self._file = self._temporary.open("wb", buffering=_BUFFER_BYTES)
        self._digest = checksum()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes and update the checksum."""
        self._digest.update(content)
        self._file.write(content)

    def commit(self) -> str:
        """Sync the file and rename it; returns its checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Delete the temporary file."""
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()


class ShardWriter:
    """Writes the two files of a shard, document by document."""

    def __init__(self, folder: Path, name: str, token_bytes: int) -> None:
        self._name = name
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._tokens = AtomicFile(folder / f"{name}.tokens")
        self._path = folder / f"{name}.documents"
        self._offsets = array("Q")
        self.tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append the tokens of one document."""
        self._offsets.append(self.tokens)
        self._tokens.write(tokens.astype(self._dtype).data)
        self.tokens += len(tokens)

    def commit(self) -> dict[str, Any]:
        """Commit both files; returns the shard's manifest entry."""
        documents = AtomicFile(self._path)
        try:
            documents.write(np.asarray(self._offsets, dtype=f"<u{BEGIN_BYTES}").data)
            checksums = {"tokens": self._tokens.commit(), "documents": documents.commit()}
        except BaseException:
            documents.discard()
            raise
        return {
            "name": self._name,
            "tokens": self.tokens,
            "documents": len(self._offsets),
            "checksums": checksums,
        }

    def discard(self) -> None:
        """Delete the temporary file."""
        self._tokens.discard()
