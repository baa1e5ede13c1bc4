"""Attention mask pattern: causal, sliding window, chunked, or full. Imports no torch.

Visible keys of a query under a causal pattern are one interval that ends at the query, so a block of the score matrix
is hidden, whole, causal or in need of a mask by arithmetic on its corners.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

TILES = 8
"""Tiles of query rows per block of the score matrix. More of them compute fewer hidden scores, in more calls."""


class Tile(NamedTuple):
    """Rectangle of a block of the score matrix, in rows and columns of the block."""

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    kind: str
    """`whole` (every key is visible), `causal` (a square on the diagonal), or `masked`."""

    @property
    def rows(self) -> slice:
        """Query rows."""
        return slice(self.first_row, self.end_row)

    @property
    def keys(self) -> slice:
        """Keys."""
        return slice(self.first_key, self.end_key)


@dataclass(frozen=True)
class MaskPattern:
    """Visible keys of a query by their positions; both limits hold if both are given."""

    window: int | None = None
    """Sliding window in keys, the query's own included."""
    chunk: int | None = None
    """Chunk length: keys of the query's chunk `position // chunk` are visible."""
    causal: bool = True
    """False if later keys are visible too: all keys, without a window or chunks."""

    def __post_init__(self) -> None:
        assert self.causal or self.is_unlimited, "only causal patterns have a window or chunks"

    @property
    def is_unlimited(self) -> bool:
        """True without a window and chunks, so that kernels need no mask."""
        return self.window is None and self.chunk is None

    @property
    def is_causal(self) -> bool:
        """True if every earlier key is visible, and no later one."""
        return self.causal and self.is_unlimited

    @property
    def reach(self) -> int | None:
        """Maximum number of visible keys; None if there is no limit."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return min(limits, default=None)

    def within(self, seq: int) -> "MaskPattern":
        """The same pattern of a sequence without the limits that it does not reach."""
        window, chunk = (None if limit is None or seq <= limit else limit for limit in (self.window, self.chunk))
        return MaskPattern(window, chunk, self.causal)

    def visible(self, query: Any, key: Any) -> Any:
        """True where a query sees a key, by positions: numbers, or tensors that broadcast."""
        found = (key <= query) | (not self.causal)
        if self.window is not None:
            found = found & (key > query - self.window)
        if self.chunk is not None:
            found = found & (key // self.chunk == query // self.chunk)
        return found

    def first_visible(self, query: int) -> int:
        """First position that a query sees."""
        of_window = 0 if self.window is None else query - self.window + 1
        return max(0, of_window, 0 if self.chunk is None else query - query % self.chunk)

    def visible_keys(self, queries: range) -> float:
        """Number of keys that these consecutive queries see, over all of them, under a causal pattern."""
        assert self.causal, "all keys of the sequence are visible"
        first, end = (_pairs(place, self.window, self.chunk) for place in (queries.start, queries.stop))
        return end - first

    def visible_per_query(self, seq: int) -> float:
        """Mean number of visible keys in a sequence."""
        return self.visible_keys(range(seq)) / seq if self.causal else float(seq)

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        """Tiles of the block of these consecutive queries and keys, which cover every visible pair once."""
        assert self.causal, "a full block is one tile"
        for first, end in self._row_tiles(queries):
            low, high = max(keys.start, self.first_visible(first)), min(keys.stop, end)
            # Later rows see later keys first: rows before the first visible key and after the last are left out.
            row, last = max(first, low), min(end, self._first_beyond(high))
            if low >= high or row >= last:
                continue
            kind = "masked"
            if self.first_visible(last - 1) <= low:
                if high - 1 <= row:
                    kind = "whole"
                elif (row, last) == (low, high):
                    kind = "causal"
            yield Tile(row - queries.start, last - queries.start, low - keys.start, high - keys.start, kind)

    def _first_beyond(self, place: int) -> int:
        """First query that sees no key before a position, for queries from there on."""
        of_window = sys.maxsize if self.window is None else place + self.window - 1
        return min(of_window, sys.maxsize if self.chunk is None else -(-place // self.chunk) * self.chunk)

    def _row_tiles(self, queries: range) -> Iterator[tuple[int, int]]:
        """First and end of consecutive rows, of one length; with chunks cut at multiples of theirs."""
        step, origin = len(queries), queries.start
        if self.chunk is not None:
            step, origin = self.chunk * max(1, -(-len(queries) // (2 * TILES * self.chunk))), 0
        if self.window is not None:
            step = min(step, max(self.window, -(-len(queries) // TILES)))
        if self.chunk is None:
            step = -(-len(queries) // -(-len(queries) // step))
        first = queries.start
        while first < queries.stop:
            end = min(queries.stop, first + step - (first - origin) % step)
            yield first, end
            first = end


CAUSAL = MaskPattern()
"""Every earlier key is visible."""
FULL = MaskPattern(causal=False)
"""Every key is visible."""


def _pairs(seq: int, window: int | None, chunk: int | None) -> float:
    if chunk is not None and chunk < seq:
        whole, rest = divmod(seq, chunk)
        return whole * _pairs(chunk, window, None) + (_pairs(rest, window, None) if rest else 0.0)
    width = min(window or seq, seq)
    return width * (width + 1) / 2 + (seq - width) * width
