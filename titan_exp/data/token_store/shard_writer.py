"""Writing files that are whole or absent: the two files of a shard, with checksums, and small ones of JSON."""

import contextlib
import json
import os
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.paths.token_store_manifest import BEGIN_BYTES

TEMPORARY = ".part"
"""Ending of a file that is not whole."""
_BUFFER = 1 << 20


def checksum() -> Any:
    """The hash of a file in a store; about a gigabyte a second, and no accident leaves it as it was."""
    return blake2b(digest_size=16)


def write_json(path: Path, values: Any) -> None:
    """Replace the file by the JSON of `values`, or leave it as it was."""
    file = AtomicFile(path)
    try:
        file.write(json.dumps(values, indent=1).encode() + b"\n")
        file.finish()
    except BaseException:
        file.discard()
        raise


class AtomicFile:
    """A file that appears under its name when it is finished and durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A process whose parent was killed may still be writing the same file for a moment.
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        self._file = self._temporary.open("wb", buffering=_BUFFER)
        self._digest = checksum()

    def write(self, content: bytes | memoryview) -> None:
        """Append."""
        self._digest.update(content)
        self._file.write(content)

    def finish(self) -> str:
        """Put the file in its place; returns its checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        return self._digest.hexdigest()

    def discard(self) -> None:
        """Remove what was written."""
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a full disk refuses the rest of the buffer again
            self._file.close()


class ShardWriter:
    """The files of one shard, which grow document by document."""

    def __init__(self, folder: Path, name: str, token_bytes: int) -> None:
        self._name = name
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._tokens = AtomicFile(folder / f"{name}.tokens")
        self._path = folder / f"{name}.documents"
        self._begins = array("Q")
        self.tokens = 0
        """Tokens so far."""

    def add(self, tokens: np.ndarray) -> None:
        """Append a document."""
        self._begins.append(self.tokens)
        self._tokens.write(tokens.astype(self._dtype).data)
        self.tokens += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Put both files in their places; returns what the manifest says of the shard."""
        documents = AtomicFile(self._path)
        try:
            documents.write(np.asarray(self._begins, dtype=f"<u{BEGIN_BYTES}").data)
            checksums = {"tokens": self._tokens.finish(), "documents": documents.finish()}
        except BaseException:
            documents.discard()
            raise
        return {"name": self._name, "tokens": self.tokens, "documents": len(self._begins), "checksums": checksums}

    def discard(self) -> None:
        """Remove what was written."""
        self._tokens.discard()
