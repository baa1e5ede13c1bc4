"""Rows of metrics by column: millions of steps in some hundred bytes each, where a dictionary takes thousands."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from titan_exp.tracking.sinks.sink import Value

_ABSENT, _NULL, _INTEGER, _FLOAT, _OTHER = range(5)
"""Kinds of a cell. Others are integers that no float holds, and lists of the record of expert load."""


class _Column:
    def __init__(self) -> None:
        self.numbers, self.kinds = array("d"), bytearray()
        self.others: dict[int, Any] = {}

    def put(self, place: int, value: Any) -> None:
        if isinstance(value, float):
            number, kind = value, _FLOAT
        elif value is None:
            number, kind = 0.0, _NULL
        else:
            number = float(value) if isinstance(value, int) else math.nan
            kind = _INTEGER if number == value else _OTHER
            if kind == _OTHER:
                self.others[place] = value
        if (missing := place - len(self.kinds)) < 0:
            self.numbers[place], self.kinds[place] = number, kind
            return
        if missing:
            self.numbers.frombytes(bytes(8 * missing))
            self.kinds.extend(bytes(missing))
        self.numbers.append(number)
        self.kinds.append(kind)

    def get(self, place: int) -> Any:
        kind = self.kinds[place] if place < len(self.kinds) else _ABSENT
        if kind <= _NULL:
            return None
        number = self.numbers[place]
        return number if kind == _FLOAT else int(number) if kind == _INTEGER else self.others[place]


class MetricRows(Sequence[dict[str, Any]]):
    """Rows of metrics, one per step, ascending; an item is made as a dictionary when it is asked for."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps = array("q")
        self._columns: dict[str, _Column] = {}
        self._late: dict[int, dict[str, Any]] = {}
        """Rows of steps between those before them, which a later attempt logged at other steps."""
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row after all others, whatever its step is."""
        self._steps.append(row["step"])
        self._put(len(self._steps) - 1, row)

    def merge(self, row: dict[str, Any]) -> None:
        """Add a row of any step. One of a later attempt replaces a known row, one of the same attempt completes it."""
        step = row["step"]
        if not self._steps or step > self._steps[-1]:
            self.append(row)
            return
        place = bisect_left(self._steps, step)
        there = self._steps[place] == step
        attempt = (self._cell("attempt", place) if there else self._late.get(step, row).get("attempt")) or 0
        later = (row.get("attempt") or 0) - attempt
        if later < 0:
            return
        if not there:
            self._late[step] = row if later else {**self._late.get(step, {}), **row}
            return
        for column in self._columns.values() if later else ():
            if place < len(column.kinds):
                column.kinds[place] = _ABSENT
        self._put(place, row)

    def in_order(self) -> MetricRows:
        """These rows in the order of their steps."""
        if not self._late:
            return self
        return MetricRows(sorted([*self, *self._late.values()], key=lambda row: row["step"]))

    def column(self, key: str) -> Iterator[Any]:
        """Value of a key in every row; None where it is unknown."""
        column = self._columns.get(key, _Column())
        return map(column.get, range(len(self)))

    def series(self, key: str, over: str, *, above: float, up_to: float) -> tuple[list[float], list[float]]:
        """Known values of `over`, above `above` and up to `up_to`, and those of `key` beside them."""
        import numpy as np

        kept, numbers = np.ones(len(self), dtype=bool), []
        for name in (over, key):
            column = self._columns.get(name, _Column())
            kinds, short = np.frombuffer(column.kinds, np.uint8), len(self) - len(column.kinds)
            kept &= np.pad(kinds, (0, short)) >= _INTEGER
            numbers.append(np.pad(np.frombuffer(column.numbers, np.float64), (0, short)))
        kept &= (numbers[0] > above) & (numbers[0] <= up_to)
        return numbers[0][kept].tolist(), numbers[1][kept].tolist()

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _row(self, place: int) -> dict[str, Any]:
        present = (pair for pair in self._columns.items() if place < len(pair[1].kinds) and pair[1].kinds[place])
        return {key: column.get(place) for key, column in present}

    def _cell(self, key: str, place: int) -> Any:
        return self._columns[key].get(place) if key in self._columns else None

    def _put(self, place: int, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = _Column()
            column.put(place, value)


def column_of(rows: Sequence[Mapping[str, Value]], key: str) -> Iterator[Value]:
    """Value of a key in every row; None where it is unknown."""
    return rows.column(key) if isinstance(rows, MetricRows) else (row.get(key) for row in rows)
