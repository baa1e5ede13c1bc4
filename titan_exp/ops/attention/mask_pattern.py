"""Attention mask pattern: causal, sliding window, chunked, or full. Imports no torch.

Under a causal pattern, the visible keys of a query are one interval that ends at the query. So arithmetic on a block's
corners tells whether the block is hidden, whole, causal, or needs a mask.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

TILES = 8
"""Number of tiles of query rows per block of the score matrix. With more tiles, fewer hidden scores are computed, in
more calls."""


class Tile(NamedTuple):
    """Rectangle of a block of the score matrix, in rows and columns of the block."""

    first_row: int
    end_row: int
    first_key: int
    end_key: int
    kind: str  # `whole` (every key is visible), `causal` (a square on the diagonal), or `masked`

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.end_row)

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.end_key)


@dataclass(frozen=True)
class MaskPattern:
    """Visible keys of a query by their positions; both limits hold if both are given."""

    window: int | None = None  # sliding window in keys, the query's own included
    chunk: int | None = None  # chunk length: a query sees the keys of its chunk `position // chunk`
    causal: bool = True  # False if later keys are visible too; then, without window and chunks, all keys are

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
        """Return the pattern for a sequence of this length, without limits that it does not reach."""
        window, chunk = (None if limit is None or seq <= limit else limit for limit in (self.window, self.chunk))
        return MaskPattern(window, chunk, self.causal)

    def visible(self, query: Any, key: Any) -> Any:
        """True where a query sees a key, by position; positions are numbers, or tensors that broadcast."""
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
        """Number of keys that these consecutive queries see in total, under a causal pattern."""
        assert self.causal, "all keys of the sequence are visible"
        first, end = (_pairs(place, self.window, self.chunk) for place in (queries.start, queries.stop))
        return end - first

    def visible_per_query(self, seq: int) -> float:
        """Mean number of visible keys in a sequence."""
        return self.visible_keys(range(seq)) / seq if self.causal else float(seq)

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        """Tiles of the block of these consecutive queries and keys. Together they cover every visible pair once."""
        assert self.causal, "a full block is one tile"
        for first, end in self._row_tiles(queries):
            low, high = max(keys.start, self.first_visible(first)), min(keys.stop, end)
            # Later rows see later keys first: rows before the first visible key and after the last are left out.
            # The first query that sees no key before `high` is one window, or a multiple of the chunk, later.
            of_window = sys.maxsize if self.window is None else high + self.window - 1
            of_chunk = sys.maxsize if self.chunk is None else -(-high // self.chunk) * self.chunk
            row, last = max(first, low), min(end, of_window, of_chunk)
            if low >= high or row >= last:
                continue
            kind = "masked"
            if self.first_visible(last - 1) <= low:
                if high - 1 <= row:
                    kind = "whole"
                elif (row, last) == (low, high):
                    kind = "causal"
            yield Tile(row - queries.start, last - queries.start, low - keys.start, high - keys.start, kind)

    def _row_tiles(self, queries: range) -> Iterator[tuple[int, int]]:
        """Begin and end of row tiles of one length; with chunks, tiles are cut at multiples of the chunk length."""
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


CAUSAL = MaskPattern()  # every earlier key is visible
FULL = MaskPattern(causal=False)  # every key is visible


def _pairs(seq: int, window: int | None, chunk: int | None) -> float:
    if chunk is not None and chunk < seq:
        whole, rest = divmod(seq, chunk)
        return whole * _pairs(chunk, window, None) + (_pairs(rest, window, None) if rest else 0.0)
    width = min(window or seq, seq)
    return width * (width + 1) / 2 + (seq - width) * width
