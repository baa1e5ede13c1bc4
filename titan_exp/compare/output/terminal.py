"""Comparison on a terminal: tables, findings and remarks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.efficiency import ScalingSeries, scaling
from titan_exp.compare.findings import findings, heading, layout_checks, remarks, stands_for
from titan_exp.compare.output.formats import Cell, TextTable, head, legend, text_table
from titan_exp.compare.output.study_sections import Section, sections
from titan_exp.config.errors.user_error import listed
from titan_exp.tracking.number_format import format_count

NARROWEST = 8
"""Minimum width of a shortened column."""
BETWEEN = 3
"""Width of the space around a column."""
ROW = "row"
"""Column of row numbers, for tables whose other key columns do not distinguish the rows."""


@dataclass(frozen=True)
class FittedTable:
    """Table whose key columns fit."""

    table: TextTable
    left_out: tuple[str, ...] = ()
    """Key columns that are not shown."""
    shortened: tuple[str, ...] = ()
    """Key columns with shortened texts."""
    labels: tuple[str, ...] = ()
    """Keys and values of each row, if rows are numbered."""

    def notes(self, width: int) -> list[str]:
        """Sentences about omitted and shortened columns, and the keys of numbered rows."""
        parts = [f"without {listed(self.left_out, 'and')}"] if self.left_out else []
        parts += [f"with shortened {listed(self.shortened, 'and')}"] if self.shortened else []
        if not parts:
            return []
        first = f"At {width} columns the table is {' and '.join(parts)}: --csv, --markdown and the page show all keys."
        return [first, *(f"row {number}: {label}" for number, label in enumerate(self.labels, 1))]


def fit_keys(table: TextTable, width: int, beside: int) -> FittedTable:
    """Fit the key columns beside columns of width `beside`, by shortening their texts, then leaving columns out.
    Numbers are never shortened. Columns that are not needed to distinguish rows go first."""
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
    """Width below which a column cannot be shortened, set by its numbers."""
    numbers = max((cell_len(row.keys[place]) for row in table.rows if _has_number(row.keys[place])), default=0)
    return min(_column_width(table, place), max(NARROWEST, numbers))


def _has_number(text: str) -> bool:
    """True for a number, or a list or mapping with one; names such as llama3_8b are text."""
    return bool(re.match(r"[-+.\d\[{]", text)) and any(map(str.isdigit, text))


def _shrunk(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns: natural if they fit; otherwise the widest shrink first."""
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
    """Last column that is not needed to distinguish rows, else the last column."""

    def distinct(kept: Sequence[int]) -> int:
        return len({tuple(row.keys[place] for place in kept) for row in table.rows})

    spared = [left for left in places if distinct([place for place in places if place != left]) == distinct(places)]
    return (spared or places)[-1]


COLORS = {"better": "green", "worse": "red", "different": "yellow"}
QUIET = "bright_black"

FINDINGS = 12
"""Maximum number of printed findings; the table has all differences."""


def show(comparison: Comparison, console: Console, *, every_key: bool = False) -> None:
    """Print a comparison in tables that fit the width. Metrics are never cut; keys are, unless `every_key`."""
    console.print(Text.assemble((comparison.name, "bold"), "  ", heading(comparison)))
    if comparison.study and comparison.study.question:
        console.print(Text(comparison.study.question, style="italic"))
    whole, width = text_table(comparison), console.width
    beside = max(_width(replace(whole, keys=()), [place]) for place in range(len(whole.metrics)))
    fitted = FittedTable(whole) if every_key else fit_keys(whole, width, beside)
    table = fitted.table
    for metrics in _split_to_width(table, range(len(table.metrics)), width):
        # Wider than a very narrow terminal rather than cut.
        console.width = max(width, _width(table, metrics))
        console.print(_table(table, metrics))
        console.width = width
    for note in fitted.notes(width):
        console.print(Text(note, style=QUIET))
    baseline = comparison.rows[comparison.baseline].label
    if len(comparison.rows) > 1:
        console.print(Text(f"baseline: {baseline} ({comparison.baseline_why})", style=QUIET))
    if marks := legend(whole):
        console.print(Text(marks, style=QUIET))
    for section in sections(comparison):
        show_section(section, console)
    # At equal tokens, which means at the first rung, differences to the best point say little.
    halved = comparison.learnt is not None and comparison.learnt.rungs
    for sentence in [] if halved else findings(comparison)[:FINDINGS]:
        console.print(Text(f"• {sentence}"))
    for series in scaling(comparison):
        console.print(_scaling_table(series))
    for sentence in [*stands_for(comparison), *remarks(comparison, layout_checks(comparison.runs))]:
        console.print(Text(sentence, style="bold red" if "MORE THAN ROUNDING" in sentence else QUIET))


def show_section(section: Section, console: Console) -> None:
    """Print a table with its notes."""
    console.print(_section_table(section))
    for note in section.notes:
        console.print(Text(note, style=QUIET))


def _table(found: TextTable, metrics: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", border_style=QUIET, pad_edge=False)
    for name in found.keys:
        table.add_column(name, no_wrap=True)
    if found.has_seeds:
        table.add_column("n", justify="right", no_wrap=True)
    if found.has_states:
        table.add_column("state", no_wrap=True)
    for place in metrics:
        table.add_column(Text(head(found.metrics[place])), justify="right", no_wrap=True)
    for row in found.rows:
        between = [row.n] if found.has_seeds else []
        between += [row.state] if found.has_states else []
        cells = [_cell(row.cells[place], baseline=row.is_baseline) for place in metrics]
        table.add_row(*map(Text, row.keys), *map(Text, between), *cells)
    return table


def _cell(cell: Cell, *, baseline: bool) -> Text:
    if baseline:
        return Text.assemble(cell.value, "\n", ("baseline", QUIET))
    if not cell.change:
        return Text(cell.value)
    style = COLORS.get(cell.verdict, QUIET)
    return Text.assemble(cell.value, "\n", (cell.below, style))


def _split_to_width(found: TextTable, metrics: Sequence[int], width: int) -> list[list[int]]:
    """Split metrics into tables that fit the width without wrapping."""
    tables: list[list[int]] = []
    for place in metrics:
        if tables and _width(found, [*tables[-1], place]) <= width:
            tables[-1].append(place)
        else:
            tables.append([place])
    return tables


def _width(found: TextTable, metrics: Sequence[int]) -> int:
    """Table width in characters, without wrapping."""
    columns = [[name, *(row.keys[place] for row in found.rows)] for place, name in enumerate(found.keys)]
    columns += [["state", *(row.state for row in found.rows)]] if found.has_states else []
    columns += [["n", *(row.n for row in found.rows)]] if found.has_seeds else []
    for place in metrics:
        cells = [_cell(row.cells[place], baseline=row.is_baseline) for row in found.rows]
        lines = [line for cell in [Text(head(found.metrics[place])), *cells] for line in cell.plain.splitlines()]
        columns.append(lines)
    return 2 + sum(max(map(cell_len, column)) + BETWEEN for column in columns)


def _section_table(section: Section) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=section.title,
        title_justify="left",
        header_style="bold",
        border_style=QUIET,
        pad_edge=False,
    )
    for place, name in enumerate(section.heads):
        table.add_column(name, justify="left" if place < section.left else "right", overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    return table


def _scaling_table(series: ScalingSeries) -> Table:
    kind = "growing global batch" if series.kind == "weak" else "same global batch"
    name = f"Scaling, {kind}{f' · {series.fixed}' if series.fixed else ''}"
    table = Table(
        box=box.SIMPLE_HEAD, title=name, title_justify="left", header_style="bold", border_style=QUIET, pad_edge=False
    )
    for column in ("layout", "processes", "tokens/s", "speedup", "efficiency"):
        layout = column == "layout"
        table.add_column(column, justify="left" if layout else "right", overflow="fold", no_wrap=not layout)
    for point in series.points:
        table.add_row(
            Text(point.label),
            str(point.world_size),
            format_count(point.tokens_per_second),
            f"{point.speedup:.2f}",
            f"{100 * point.efficiency:.0f} %",
        )
    return table
