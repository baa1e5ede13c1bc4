"""One split of a token store as one long sequence of tokens, of which any window is read through memory maps."""

from bisect import bisect_right
from functools import lru_cache
from pathlib import Path

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.token_store_manifest import BEGIN_BYTES, Manifest, Shard, wrong_size

_MAPPED_SHARDS = 256


class TokenSplit:
    """The shards of a split, end to end. Opening it reads nothing: a shard is mapped when a window first needs it."""

    def __init__(self, manifest: Manifest, split: str) -> None:
        self._manifest = manifest
        self._shards = manifest.splits[split]
        self._firsts: list[int] = np.cumsum([0, *(shard.tokens for shard in self._shards)]).tolist()
        self._map = lru_cache(maxsize=_MAPPED_SHARDS)(lambda number: _map(manifest, self._shards[number]))

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, begin: int, window: np.ndarray) -> list[int]:
        """Fill `window` with the tokens from `begin` on.

        Returns where in it documents begin, its first token left out. Raises UserError where a shard is damaged.
        """
        filled, starts = 0, []
        number = bisect_right(self._firsts, begin) - 1
        while filled < len(window):
            tokens, begins = self._map(number)
            at = begin + filled - self._firsts[number]
            piece = tokens[at : at + len(window) - filled]
            window[filled : filled + len(piece)] = piece
            first, last = np.searchsorted(begins, (at, at + len(piece)))
            starts += (begins[first:last].astype(np.int64) - at + filled).tolist()
            filled += len(piece)
            number += 1
        return starts[1:] if starts and starts[0] == 0 else starts

    def tokens_in(self, documents: int | None) -> int:
        """How many tokens the first so many documents have; all there are where None, or where there are fewer."""
        if documents is None:
            return len(self)
        for number, shard in enumerate(self._shards):
            if documents < shard.documents:
                _, begins = self._map(number)
                return self._firsts[number] + int(begins[documents])
            documents -= shard.documents
        return len(self)


def _map(manifest: Manifest, shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and document beginnings of a shard. A map beyond the end of a file would end the process without a word,
    so sizes are looked at first."""
    tokens = _array(manifest.path / f"{shard.name}.tokens", f"<u{manifest.token_bytes}", shard.tokens)
    return tokens, _array(manifest.path / f"{shard.name}.documents", f"<u{BEGIN_BYTES}", shard.documents)


def _array(path: Path, dtype: str, length: int) -> np.ndarray:
    trouble = wrong_size(path, length * np.dtype(dtype).itemsize)
    if trouble:
        remedy = f"titan-exp tokenize check={path.parent} looks at all of the store; then copy it, or make it, anew"
        violation = Violation("data.paths", str(path.parent), f"{path.name}: {trouble}", remedy)
        raise UserError("The token store is damaged.", [violation])
    # As a plain array, which is sliced in a third of the time that a memmap takes.
    return np.memmap(path, dtype, mode="r", shape=(length,)).view(np.ndarray)
