"""Token store reader: a split as one sequence of tokens, read through memory maps."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.data_files import BEGIN_BYTES, Manifest, Shard, wrong_size

ReadWindow = Callable[[int, np.ndarray], list[int]]
"""Fills a window with the tokens from an offset on; returns its document starts, except at the first token."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of concatenated documents."""

    tokens: int
    """Number of tokens, at least 2."""
    read: ReadWindow


def concatenate(documents: Iterable[np.ndarray]) -> TokenSequence:
    """Concatenate tokenized documents in memory."""
    parts = list(documents)
    tokens, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts[:-1])])

    def read(begin: int, window: np.ndarray) -> list[int]:
        window[:] = tokens[begin : begin + len(window)]
        first, last = np.searchsorted(starts, (begin + 1, begin + len(window)))
        return (starts[first:last] - begin).tolist()

    return TokenSequence(len(tokens), read)


_MAX_MAPPED_SHARDS = 256


class TokenSplit:
    """Concatenated shards of a split, memory-mapped on first use."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        self._manifest = manifest
        self._shards = manifest.splits[split]
        self._offsets: list[int] = np.cumsum([0, *(shard.tokens for shard in self._shards)]).tolist()
        self._map = lru_cache(maxsize=_MAX_MAPPED_SHARDS)(lambda number: _map(manifest, self._shards[number]))

    def __len__(self) -> int:
        return self._offsets[-1]

    def read(self, begin: int, window: np.ndarray) -> list[int]:
        """Fill `window` with the tokens from `begin` on; returns its document starts, except at the first token. Raises
        UserError if a shard is damaged."""
        filled, starts = 0, []
        number = bisect_right(self._offsets, begin) - 1
        while filled < len(window):
            tokens, begins = self._map(number)
            offset = begin + filled - self._offsets[number]
            chunk = tokens[offset : offset + len(window) - filled]
            window[filled : filled + len(chunk)] = chunk
            first, last = np.searchsorted(begins, (offset, offset + len(chunk)))
            starts += (begins[first:last].astype(np.int64) - offset + filled).tolist()
            filled += len(chunk)
            number += 1
        return starts[1:] if starts and starts[0] == 0 else starts

    def tokens_in(self, documents: int | None) -> int:
        """Number of tokens in the first `documents` documents (None: all)."""
        if documents is None:
            return len(self)
        for number, shard in enumerate(self._shards):
            if documents < shard.documents:
                _, begins = self._map(number)
                return self._offsets[number] + int(begins[documents])
            documents -= shard.documents
        return len(self)


def open_split(split: TokenSplit, documents: int | None) -> TokenSequence:
    """Sequence of the first `documents` documents of a split (None: all)."""
    return TokenSequence(split.tokens_in(documents), split.read)


def _map(manifest: Manifest, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens and document beginnings of a shard."""
    tokens = _array(manifest.path / f"{shard.name}.tokens", f"<u{manifest.token_bytes}", shard.tokens)
    return tokens, _array(manifest.path / f"{shard.name}.documents", f"<u{BEGIN_BYTES}", shard.documents)


def _array(path: Path, dtype: str, length: int) -> np.ndarray:
    # Check sizes first: reading a map beyond the end of its file raises SIGBUS.
    problem = wrong_size(path, length * np.dtype(dtype).itemsize)
    if problem:
        remedy = f"titan-exp tokenize check={path.parent} checks the whole store; then copy or rebuild it"
        violation = Violation("data.paths", str(path.parent), f"{path.name}: {problem}", remedy)
        raise UserError("The token store is damaged.", [violation])
    # A plain array slices three times as fast as a memmap.
    return np.memmap(path, dtype, mode="r", shape=(length,)).view(np.ndarray)
