"""Width of a terminal table: metrics in full, key columns shortened or left out."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from titan_exp.compare.output.table import TextTable
from titan_exp.config.errors.did_you_mean import listed

NARROWEST = 8
"""Minimum width of a shortened column."""
BETWEEN = 3
"""Width of the space around a column."""
ROW = "row"
"""Column of row numbers, where the other key columns do not distinguish the rows."""


@dataclass(frozen=True)
class FittedTable:
    """Table whose key columns fit."""

    table: TextTable
    left_out: tuple[str, ...] = ()
    """Key columns that are not shown."""
    shortened: tuple[str, ...] = ()
    """Key columns with shortened texts."""
    labels: tuple[str, ...] = ()
    """Keys and values of each row, if rows have numbers."""

    def notes(self, width: int) -> list[str]:
        """Sentences about omitted and shortened columns, and the keys of numbered rows."""
        parts = [f"without {listed(self.left_out, 'and')}"] if self.left_out else []
        parts += [f"with shortened {listed(self.shortened, 'and')}"] if self.shortened else []
        if not parts:
            return []
        first = f"At {width} columns the table is {' and '.join(parts)}: --csv, --markdown and the page show all keys."
        return [first, *(f"row {number}: {label}" for number, label in enumerate(self.labels, 1))]


def fit_keys(table: TextTable, width: int, beside: int) -> FittedTable:
    """Shorten texts of key columns, then leave columns out, until the key columns fit beside columns of width
    `beside`. Numbers are never shortened. Columns without which rows stay distinct are left out first."""
    places = list(range(len(table.keys)))
    while True:
        natural = [_column_width(table, place) for place in places]
        least = [_least_width(table, place) for place in places]
        fitted = _with_widths(table, places, _shrunk(natural, least, width - beside))
        shown = [row.keys for row in fitted.table.rows]
        numbers = 0 if len(set(shown)) == len({row.keys for row in table.rows}) else len(str(len(shown)))
        room = width - beside - (max(numbers, len(ROW)) + BETWEEN if numbers else 0)
        if numbers:
            fitted = _numbered(table, _with_widths(table, places, _shrunk(natural, least, room)))
        if not places or sum(least) + BETWEEN * len(least) <= room:
            return fitted
        places.remove(_expendable(table, places))


def _column_width(table: TextTable, place: int) -> int:
    return max(map(cell_len, [table.keys[place], *(row.keys[place] for row in table.rows)]))


def _least_width(table: TextTable, place: int) -> int:
    """Width below which a column cannot be shortened: that of its numbers."""
    numbers = max((cell_len(row.keys[place]) for row in table.rows if _has_number(row.keys[place])), default=0)
    return min(_column_width(table, place), max(NARROWEST, numbers))


def _has_number(text: str) -> bool:
    """True for a number, or a list or mapping with one; names such as llama3_8b are text."""
    return bool(re.match(r"[-+.\d\[{]", text)) and any(map(str.isdigit, text))


def _shrunk(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns: natural where they fit, else the widest are shrunk first."""
    widths = list(natural)
    while sum(widths) + BETWEEN * len(widths) > room:
        over = [place for place in range(len(widths)) if widths[place] > least[place]]
        if not over:
            break
        widths[max(over, key=lambda place: widths[place])] -= 1
    return widths


def _with_widths(table: TextTable, places: Sequence[int], widths: Sequence[int]) -> FittedTable:
    def cut(texts: Sequence[str]) -> tuple[str, ...]:
        pairs = zip(places, widths, strict=True)
        return tuple(
            text if cell_len(text := texts[place]) <= width else f"{text[: width - 1]}…" for place, width in pairs
        )

    left_out = tuple(name for place, name in enumerate(table.keys) if place not in places)
    rows = tuple(replace(row, keys=cut(row.keys)) for row in table.rows)
    cells = zip(places, widths, strict=True)
    shortened = tuple(table.keys[place] for place, width in cells if width < _column_width(table, place))
    return FittedTable(replace(table, keys=cut(table.keys), rows=rows), left_out, shortened)


def _numbered(table: TextTable, fitted: FittedTable) -> FittedTable:
    rows = [replace(row, keys=(str(number), *row.keys)) for number, row in enumerate(fitted.table.rows, 1)]
    labels = [
        " ".join(f"{name}={value}" for name, value in zip(table.keys, row.keys, strict=True)) for row in table.rows
    ]
    numbered = replace(fitted.table, keys=(ROW, *fitted.table.keys), rows=tuple(rows))
    return replace(fitted, table=numbered, labels=tuple(labels))


def _expendable(table: TextTable, places: Sequence[int]) -> int:
    """Last column without which as many rows are distinct, else the last."""

    def distinct(kept: Sequence[int]) -> int:
        return len({tuple(row.keys[place] for place in kept) for row in table.rows})

    spared = [left for left in places if distinct([place for place in places if place != left]) == distinct(places)]
    return (spared or places)[-1]
