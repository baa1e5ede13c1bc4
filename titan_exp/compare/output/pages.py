"""Comparison as a self-contained HTML page, and on a terminal.

Tables need no scripts; the scripts in `page/` draw the plots from embedded numbers.
"""

import base64
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan_exp.compare import findings
from titan_exp.compare.compared_metrics import ABSENT, Metric, value_text
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.output import study_sections
from titan_exp.compare.output.formats import Cell, TextTable, head, legend, text_table, title
from titan_exp.compare.output.plots import expert_load_png, study_plots
from titan_exp.compare.runs import ComparedRun
from titan_exp.config.command_line.output import plain
from titan_exp.config.errors.user_error import listed
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.tracking.display import format_count, format_items, render_page
from titan_exp.tracking.run_folder.metrics_jsonl import last_fiftieth
from titan_exp.tracking.run_folder.run_folder import RunFolder

POINTS = 120_000  # maximum number of points of a page, over all runs
MIN_POINTS, MAX_POINTS = 60, 1_000  # minimum and maximum number of points of one curve


def downsampled_curves(comparison: Comparison) -> list[dict[str, Any]]:
    """Curves of every run that has rows: `loss` and `validation_loss` as [tokens, steps, values, rows of each point]. A
    non-finite value is None, which leaves a gap."""
    runs = comparison.runs
    most = max(MIN_POINTS, min(MAX_POINTS, POINTS // max(1, len(runs))))
    return [
        {
            "row": index,
            "seed": run.seed,
            "run": run.run_id,
            "loss": downsample(run, "loss", most),
            "validation_loss": downsample(run, "validation_loss", most),
        }
        for index, row in enumerate(comparison.rows)
        for run in row.runs
        if run.rows
    ]


def downsample(run: ComparedRun, key: str, most: int) -> list[list[float | None]]:
    """Average a metric over neighbouring rows to at most `most` points; returns tokens, steps, values and rows per
    point. A group with a non-finite value becomes None, so that a divergence stays visible. No group mixes rows of the
    last 2 %, whose mean is the run's loss, with other rows."""
    known = [
        (float(tokens), float(step or 0), float(value))
        for tokens, step, value in zip(*map(run.rows.column, ("tokens", "step", key)), strict=True)
        if value is not None and tokens is not None
    ]
    size, tail = math.ceil(len(known) / most) or 1, len(known) - len(last_fiftieth(known))
    while len(starts := [*range(0, tail, size), *range(tail, len(known), size)]) > most:
        size += 1
    columns: list[list[float | None]] = [[], [], [], []]
    for start, end in pairwise([*starts, len(known)]):
        group = known[start:end]
        tokens, steps, values = zip(*group, strict=True)
        mean = math.fsum(values) / len(group) if all(map(math.isfinite, values)) else None
        columns[0].append(sum(tokens) / len(group))
        columns[1].append(sum(steps) / len(group))
        columns[2].append(None if mean is None else float(f"{mean:.6g}"))
        columns[3].append(len(group))
    return columns


PICTURES = 12  # maximum number of embedded pictures of a kind; one takes about 60 kB
SCRIPTS = ("frame.js", "curves.js", "bars.js", "dots.js", "tables.js", "start.js")  # scripts of `page/`, in load order


def to_html(comparison: Comparison) -> str:
    """Render a comparison as HTML."""
    checks = findings.layout_checks(comparison.runs)
    series, table = study_sections.scaling(comparison), text_table(comparison)
    flat = [flatten(row.runs[0].config) for row in comparison.rows]
    return render_page(
        "titan_exp.compare.output",
        SCRIPTS,
        plain(_numbers(comparison, series)),
        comparison=comparison,
        table=table,
        head=head,
        legend=legend(table),
        token_budget=findings.token_budget_text(comparison),
        states=sorted(Counter(run.shown for run in comparison.runs).items()),
        findings=findings.labelled_findings(comparison),
        remarks=[*findings.stands_for(comparison), *findings.remarks(comparison, [])],
        checks=checks,
        scaling=series,
        format_count=format_count,
        items=format_items,
        differing=[
            (key, [value_text(values[key]) if key in values else ABSENT for values in flat])
            for key in comparison.differing_keys.all_keys
        ],
        sections=study_sections.sections(comparison),
        plots=[(name, base64.b64encode(picture).decode()) for name, picture in study_plots(comparison)],
        pictures=list(islice(_expert_load(comparison), PICTURES)),
        grids=list(islice(_image_grids(comparison), PICTURES)),
    )


def _expert_load(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for row in comparison.rows:
        recorded = (run for run in row.runs if RunFolder(run.source).expert_load.is_file())
        if (run := next(recorded, None)) is None:
            continue
        if (picture := expert_load_png(Path(run.source))) is not None:
            yield row.name_of(run), base64.b64encode(picture).decode()


def _image_grids(comparison: Comparison) -> Iterator[tuple[str, str]]:
    for row in comparison.rows:
        found = ((run, sorted(RunFolder(run.source).images.glob("step-*[0-9].png"))) for run in row.runs)
        run, grids = next(((run, grids) for run, grids in found if grids), (None, []))
        if run is not None:
            step = int(grids[-1].stem.removeprefix("step-"))
            yield f"{row.name_of(run)}, step {step}", base64.b64encode(grids[-1].read_bytes()).decode()


def _numbers(comparison: Comparison, series: Sequence[Any]) -> dict[str, Any]:
    loss = study_sections.loss_metric(comparison)
    return {
        "rows": [
            {"label": row.label, "baseline": index == comparison.baseline} for index, row in enumerate(comparison.rows)
        ],
        "point": comparison.budget.tokens,
        "curves": downsampled_curves(comparison),
        "metrics": [_metric_numbers(comparison, metric) for metric in comparison.metrics],
        "scaling": [
            {
                "kind": group.kind,
                "fixed": group.fixed,
                "points": [
                    {"row": p.row, "label": p.label, "x": p.world_size, "y": p.speedup, "e": p.efficiency}
                    for p in group.points
                ],
            }
            for group in series
        ],
        "pareto": {
            "loss": loss.title if loss else "",
            "cost": study_sections.cost_metric(comparison).title,
            "points": [
                {"row": p.row, "x": p.gpu_hours, "y": p.loss, "front": p.is_on_front}
                for p in study_sections.pareto(comparison)
            ],
        },
    }


def _metric_numbers(comparison: Comparison, metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "title": title(metric),
        "unit": metric.unit,
        "better": metric.better,
        "values": [
            [found.mean, found.low, found.high] if (found := row.estimates[metric.name]) else None
            for row in comparison.rows
        ],
        "seeds": [list(row.numbers[metric.name].values()) for row in comparison.rows],
        "deltas": [
            [delta.difference, delta.low, delta.high, findings.verdict(metric, delta, comparison.standing)]
            if (delta := row.deltas[metric.name]) is not None
            else None
            for row in comparison.rows
        ],
    }


NARROWEST = 8  # minimum width of a shortened column
BETWEEN = 3  # width of the space around a column
ROW = "row"  # column of row numbers, for tables whose other key columns do not distinguish the rows


@dataclass(frozen=True)
class FittedTable:
    """Table whose key columns fit."""

    table: TextTable
    left_out: tuple[str, ...] = ()  # key columns that are not shown
    shortened: tuple[str, ...] = ()  # key columns with shortened texts
    labels: tuple[str, ...] = ()  # keys and values of each row, if rows are numbered

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
    columns = [_Column(name, tuple(row.keys[place] for row in table.rows)) for place, name in enumerate(table.keys)]
    numbers, kept = _Column(ROW, tuple(str(number) for number in range(1, len(table.rows) + 1))), list(columns)
    while True:
        room = width - beside
        shown = _shrunk(kept, room)
        numbered = _distinct(shown) < _distinct(columns)
        if numbered:
            room -= numbers.width + BETWEEN
            shown = [numbers, *_shrunk(kept, room)]
        if not kept or sum(column.least + BETWEEN for column in kept) <= room:
            break
        spared = [one for one in kept if _distinct([other for other in kept if other != one]) == _distinct(kept)]
        kept.remove((spared or kept)[-1])
    rows = [replace(row, keys=tuple(column.texts[place] for column in shown)) for place, row in enumerate(table.rows)]
    pairs = [zip(table.keys, row.keys, strict=True) for row in table.rows]
    labels = tuple(" ".join(f"{name}={value}" for name, value in row) for row in pairs)
    return FittedTable(
        replace(table, keys=tuple(column.name for column in shown), rows=tuple(rows)),
        left_out=tuple(column.name for column in columns if column not in kept),
        shortened=tuple(column.name for column in kept if column not in shown),
        labels=labels if numbered else (),
    )


class _Column(NamedTuple):
    """Key column with the text of each row."""

    name: str
    texts: tuple[str, ...]

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.name, *self.texts)))

    @property
    def least(self) -> int:
        """Width below which the column cannot be shortened, set by its numbers."""
        # Text that begins as a number, list or mapping and has a digit; names such as llama3_8b are text.
        numbers = [text for text in self.texts if re.match(r"[-+.\d\[{]", text) and any(map(str.isdigit, text))]
        return min(self.width, max([NARROWEST, *map(cell_len, numbers)]))

    def cut(self, width: int) -> "_Column":
        texts = (text if cell_len(text) <= width else f"{text[: width - 1]}…" for text in (self.name, *self.texts))
        name, *rows = texts
        return _Column(name, tuple(rows))


def _shrunk(columns: Sequence[_Column], room: int) -> list[_Column]:
    """Columns as they are if they fit; otherwise the widest shrink first."""
    widths = [column.width for column in columns]
    while sum(widths) + BETWEEN * len(widths) > room:
        over = [place for place, column in enumerate(columns) if widths[place] > column.least]
        if not over:
            break
        widths[max(over, key=lambda place: widths[place])] -= 1
    return [column.cut(width) for column, width in zip(columns, widths, strict=True)]


def _distinct(columns: Sequence[_Column]) -> int:
    """Number of rows that the columns tell apart."""
    return len(set(zip(*(column.texts for column in columns), strict=True))) or 1


COLORS = {"better": "green", "worse": "red", "different": "yellow"}
QUIET = "bright_black"
FINDINGS = 12  # maximum number of printed findings; the table has all differences


def show(comparison: Comparison, console: Console, *, every_key: bool = False) -> None:
    """Print a comparison in tables that fit the width. Metrics are never cut; keys are, unless `every_key`."""
    console.print(Text.assemble((comparison.name, "bold"), "  ", findings.heading(comparison)))
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
    for section in study_sections.sections(comparison):
        show_section(section, console)
    # At equal tokens, which means at the first rung, differences to the best point say little.
    halved = comparison.learnt is not None and comparison.learnt.rungs
    for sentence in [] if halved else findings.findings(comparison)[:FINDINGS]:
        console.print(Text(f"• {sentence}"))
    for series in study_sections.scaling(comparison):
        console.print(_scaling_table(series))
    for sentence in [
        *findings.stands_for(comparison),
        *findings.remarks(comparison, findings.layout_checks(comparison.runs)),
    ]:
        console.print(Text(sentence, style="bold red" if "MORE THAN ROUNDING" in sentence else QUIET))


def _grid(title: str | None = None) -> Table:
    look = {"box": box.SIMPLE_HEAD, "header_style": "bold", "border_style": QUIET}
    return Table(title=title, title_justify="left", pad_edge=False, **look)


def show_section(section: study_sections.Section, console: Console) -> None:
    """Print a table with its notes."""
    table = _grid(section.title)
    for place, name in enumerate(section.heads):
        table.add_column(name, justify="left" if place < section.left else "right", overflow="fold")
    for row in section.rows:
        table.add_row(*map(Text, row))
    console.print(table)
    for note in section.notes:
        console.print(Text(note, style=QUIET))


def _columns(found: TextTable, metrics: Sequence[int]) -> Iterator[tuple[str, Literal["left", "right"], list[Text]]]:
    """Heading, alignment and cells of each column."""
    for place, name in enumerate(found.keys):
        yield name, "left", [Text(row.keys[place]) for row in found.rows]
    if found.has_seeds:
        yield "n", "right", [Text(row.n) for row in found.rows]
    if found.has_states:
        yield "state", "left", [Text(row.state) for row in found.rows]
    for place in metrics:
        cells = [_cell(row.cells[place], baseline=row.is_baseline) for row in found.rows]
        yield head(found.metrics[place]), "right", cells


def _table(found: TextTable, metrics: Sequence[int]) -> Table:
    table, columns = _grid(), list(_columns(found, metrics))
    for name, justify, _ in columns:
        table.add_column(Text(name), justify=justify, no_wrap=True)
    for cells in zip(*(cells for *_, cells in columns), strict=True):
        table.add_row(*cells)
    return table


def _cell(cell: Cell, *, baseline: bool) -> Text:
    if baseline:
        return Text.assemble(cell.value, "\n", ("baseline", QUIET))
    if not cell.change:
        return Text(cell.value)
    style = COLORS.get(cell.verdict, QUIET)
    return Text.assemble(cell.value, "\n", (cell.below, style))


def _split_to_width(found: TextTable, metrics: Sequence[int], width: int) -> list[list[int]]:
    tables: list[list[int]] = []
    for place in metrics:
        if tables and _width(found, [*tables[-1], place]) <= width:
            tables[-1].append(place)
        else:
            tables.append([place])
    return tables


def _width(found: TextTable, metrics: Sequence[int]) -> int:
    columns = [[name, *(cell.plain for cell in cells)] for name, _, cells in _columns(found, metrics)]
    return 2 + sum(max(cell_len(line) for text in texts for line in text.splitlines()) + BETWEEN for texts in columns)


def _scaling_table(series: study_sections.ScalingSeries) -> Table:
    kind = "growing global batch" if series.kind == "weak" else "same global batch"
    name = f"Scaling, {kind}{f' · {series.fixed}' if series.fixed else ''}"
    table = _grid(name)
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
