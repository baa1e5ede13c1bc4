"""Token sequence: the concatenated documents of a validation split, in memory or in a token store."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

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
