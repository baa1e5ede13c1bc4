"""Comparison as Markdown, CSV, LaTeX and JSON."""

import csv
import io
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from titan_exp.compare import findings
from titan_exp.compare.compared_metrics import Metric, value_text
from titan_exp.compare.comparison import Comparison
from titan_exp.compare.from_wandb import explain_wandb_errors
from titan_exp.compare.output.study_sections import escape_markdown, markdown, markdown_table, pareto, scaling, sections
from titan_exp.compare.runs import ComparedRun, Row
from titan_exp.config.study.study import FEWEST_PAIRS

MARKS = {
    "not distinguishable": "n.d.",
    "only uncorrected": "n.d.*",
    "too few seeds": f"n < {FEWEST_PAIRS}",
    "no interval": "n = 1",
    "different": "differs",
}
"""Abbreviated significance labels; `better` and `worse` are not abbreviated."""


@dataclass(frozen=True)
class Cell:
    """One metric of one row."""

    value: str  # mean ± half-width of its interval
    change: str  # difference to the baseline; empty in the baseline's row
    verdict: str
    mark: str

    @property
    def below(self) -> str:
        """Second line of the cell: the difference, marked if it is not distinguishable or of too few seeds."""
        return f"{self.change} {self.mark}" if self.mark.startswith(("n.d.", "n <")) else self.change


@dataclass(frozen=True)
class TextRow:
    """One row of the text table."""

    keys: tuple[str, ...]  # values of the differing keys
    n: str  # number of runs, or `2 of 3` if fewer are in the mean of the main metric
    state: str
    cells: tuple[Cell, ...]  # one cell per metric
    is_baseline: bool


@dataclass(frozen=True)
class TextTable:
    """Text of the comparison table."""

    keys: tuple[str, ...]  # short names of the differing keys
    metrics: tuple[Metric, ...]  # metrics of the other columns
    rows: tuple[TextRow, ...]
    has_seeds: bool  # True if a row has more than one run
    has_states: bool  # True if a run is not done


def text_table(comparison: Comparison) -> TextTable:
    """Build the text table of a comparison."""
    rows = tuple(_row(comparison, index, row) for index, row in enumerate(comparison.rows))
    names = tuple(comparison.differing_keys.short[key] for key in comparison.differing_keys.keys)
    names = ("point", *names) if any(row.is_named for row in comparison.rows) else names
    return TextTable(
        names or ("run",),
        comparison.metrics,
        rows,
        any(len(row.runs) > 1 for row in comparison.rows),
        any(row.state != "done" for row in rows),
    )


def title(metric: Metric) -> str:
    """Column heading of a metric."""
    unit = "" if metric.unit in ("", "h", "nats") or metric.unit in metric.title else f" ({metric.unit})"
    return f"{metric.title}{unit}"


def head(metric: Metric) -> str:
    """Column heading of a metric, with an arrow to its better values."""
    return title(metric) + {"min": " ↓", "max": " ↑", None: ""}[metric.better]


LEGEND = {
    " ↓": "↓: lower is better",
    " ↑": "↑: higher is better",
    " ± ": "±: half of the 95 % interval over seeds",
    "[": "[ , ]: 95 % interval of the difference to the baseline",
    "n.d.\n": "n.d.: not distinguishable from the baseline",
    "n.d.*\n": "n.d.*: distinguishable alone, but not after Holm's correction for all rows",
    MARKS["too few seeds"]: f"{MARKS['too few seeds']} pairs of seeds, which tell no difference from noise",
    "diverged": "diverged: no run's loss is finite",
    findings.MISSING: f"{findings.MISSING}: no number, such as that of a run that failed or has fewer tokens",
    "better\n": "green: better than the baseline",
    "worse\n": "red: worse than the baseline",
    "different\n": "yellow: distinguishable from the baseline, which is not a verdict",
}
"""Meanings of marks and colours, by the text that has them."""


def legend(table: TextTable) -> str:
    """Meanings of the marks and colours that a table has."""
    texts = [head(metric) for metric in table.metrics]
    texts += [text for row in table.rows for cell in row.cells for text in (cell.value, cell.below, cell.verdict)]
    said = "\n".join([*texts, ""])
    return "; ".join(meaning for mark, meaning in LEGEND.items() if mark in said)


def _row(comparison: Comparison, index: int, row: Row) -> TextRow:
    keys = tuple(value_text(row.values[key]) for key in comparison.differing_keys.keys)
    keys = (row.label, *keys) if any(other.is_named for other in comparison.rows) else keys or (row.runs[0].run_id,)
    cells = tuple(_cell(comparison, metric, index, row) for metric in comparison.metrics)
    estimate, runs = row.estimates[comparison.main.name], len(row.runs)
    n = f"{estimate.n} of {runs}" if estimate is not None and estimate.n < runs else str(runs)
    return TextRow(keys, n, findings.state_text(row), cells, index == comparison.baseline)


def _cell(comparison: Comparison, metric: Metric, index: int, row: Row) -> Cell:
    decimals = findings.column_decimals(metric, (other.estimates[metric.name] for other in comparison.rows))
    number = findings.with_interval(metric, row.estimates[metric.name], decimals)
    if row.estimates[metric.name] is None and row.diverged(metric.name):
        number = "diverged"
    if index == comparison.baseline:
        return Cell(number, "", "", "")
    baseline = comparison.rows[comparison.baseline].estimates[metric.name]
    delta = row.deltas[metric.name]
    result = findings.verdict(metric, delta, comparison.standing)
    text = findings.change(metric, delta, baseline.mean if baseline else None)
    return Cell(number, text, result, MARKS.get(result, result))


def publish(comparison: Comparison, place: str) -> str:
    """Create a Report in the project `place` (`ENTITY/PROJECT`), with panels of the runs in the same group; returns its
    URL. Existing reports stay. Raises UserError without wandb, wandb_workspaces or the server."""
    with explain_wandb_errors(place):
        report = report_of(comparison, place)
        report.save()
        return report.url


def report_of(comparison: Comparison, place: str) -> Any:
    """Build the Report without saving it; imports `wandb_workspaces`."""
    import wandb_workspaces.reports.v2 as reports
    from wandb_workspaces import expr

    entity, _, project = place.partition("/")
    study = comparison.runs[0].study
    runs = reports.Runset(
        entity=entity,
        project=project,
        name=study,
        filters=[expr.Metric("group") == study],
        groupby=[f"config.{key}" for key in comparison.differing_keys.all_keys],
    )
    # W&B has the keys of metrics.jsonl, but no derived metrics.
    titles = {"loss": "training loss", "validation_loss": "validation loss"}
    plot = partial(reports.LinePlot, x="tokens", smoothing_type="none")
    panels = [*(plot(title=title, y=[key]) for key, title in titles.items()), reports.RunComparer(diff_only=True)]
    grid = reports.PanelGrid(runsets=[runs], panels=panels)
    blocks = [reports.MarkdownBlock(to_markdown(comparison)), grid]
    question = comparison.study.question if comparison.study else ""
    title = f"{comparison.name}, compared"
    return reports.Report(entity=entity, project=project, title=title, description=question, blocks=blocks)


RUN_FIELDS = (
    *("run_id", "experiment_id", "seed", "state", "reason", "step", "tokens", "world_size"),
    *("commit", "dirty", "source"),
)
"""Fields of a run in the JSON output."""


ESTIMATED = {"": "mean", ".low": "low", ".high": "high"}
COMPARED = {"delta": "difference", "delta_low": "low", "delta_high": "high", "p": "p", "p_holm": "p_holm"}
"""Fields of an estimate and of a difference, by the ending of their column."""


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat dictionary per row, for a data frame: its label, full keys, and plain numbers for every metric. A metric
    NAME gives NAME, NAME.low, NAME.high, NAME.n, and against the baseline NAME.delta, NAME.delta_low, NAME.delta_high,
    NAME.p, NAME.p_holm and NAME.verdict. Unknown numbers are None. Sections of extensions add theirs."""
    found = [_record(comparison, index, row) for index, row in enumerate(comparison.rows)]
    added = [section.values for section in comparison.added_sections if section.values]
    for index, own in enumerate(found):
        for values in added:
            own |= {name: value for name, value in values[index].items() if name not in own}
    return found


def to_csv(comparison: Comparison) -> str:
    """`records` as CSV with a header; numbers are exact."""
    found = records(comparison)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()


def json_values(comparison: Comparison) -> dict[str, Any]:
    """Comparison as JSON values, without curves."""
    study = comparison.study
    checks = findings.layout_checks(comparison.runs)
    return {
        "name": comparison.name,
        "question": study.question if study else None,
        "tokens": comparison.budget.tokens if math.isfinite(comparison.budget.tokens) else None,
        "tokens_why": comparison.budget.why,
        "keys": comparison.differing_keys.keys,
        "stands_for": comparison.differing_keys.stands_for,
        "metrics": [
            {name: getattr(metric, name) for name in ("name", "title", "unit", "better", "meaning")}
            for metric in comparison.metrics
        ],
        "baseline": comparison.rows[comparison.baseline].label,
        "rows": [
            {**record, "runs": [_run(comparison, row, run) for run in row.runs]}
            for row, record in zip(comparison.rows, records(comparison), strict=True)
        ],
        "registered": None if comparison.standing is None else asdict(comparison.standing),
        "tuning": None if comparison.tuning is None else asdict(comparison.tuning),
        "learnt": None if comparison.learnt is None else asdict(comparison.learnt),
        "ladder": None if comparison.ladder is None else asdict(comparison.ladder),
        "scaling": [asdict(series) for series in scaling(comparison)],
        "pareto": [asdict(point) for point in pareto(comparison)],
        "layout_checks": [{**asdict(check), "holds": check.holds} for check in checks],
        "notes": {section.title: section.notes for section in comparison.added_sections},
        "findings": findings.findings(comparison),
        "remarks": [*findings.stands_for(comparison), *findings.remarks(comparison, checks)],
    }


def to_markdown(comparison: Comparison) -> str:
    """Comparison as GitHub Markdown: table, findings, remarks."""
    found = text_table(comparison)
    heads = [*found.keys, *["n"][: found.has_seeds], *["state"][: found.has_states]]
    lines = [
        [
            *(*row.keys, *[row.n][: found.has_seeds], *[row.state][: found.has_states]),
            *(_cell_text(cell, baseline=row.is_baseline) for cell in row.cells),
        ]
        for row in found.rows
    ]
    rows = markdown_table([*heads, *map(title, found.metrics)], lines, len(heads))
    question = [comparison.study.question, ""] if comparison.study and comparison.study.question else []
    sentences = [
        *findings.findings(comparison),
        *findings.stands_for(comparison),
        *findings.remarks(comparison, findings.layout_checks(comparison.runs)),
    ]
    head = [
        f"## {escape_markdown(comparison.name)}",
        "",
        *map(escape_markdown, question),
        escape_markdown(findings.heading(comparison)),
        "",
    ]
    added = markdown(sections(comparison))
    return "\n".join([*head, *rows, "", *added, *(f"- {escape_markdown(sentence)}" for sentence in sentences)]) + "\n"


def to_latex(comparison: Comparison) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`; better values are bold."""
    found = text_table(comparison)
    spec = "l" * len(found.keys) + "r" * (found.has_seeds + len(found.metrics))
    titles = [_latex(title(metric)) for metric in found.metrics]
    lines = [[*map(_latex, found.keys), *["$n$"][: found.has_seeds], *titles]]
    for row in found.rows:
        cells = [_latex_cell(cell, baseline=row.is_baseline) for cell in row.cells]
        lines.append([*map(_latex, row.keys), *[row.n][: found.has_seeds], *cells])
    body = [" & ".join(line) + r" \\" for line in lines]
    body = [body[0], r"\midrule", *body[1:]]
    note = f"% {comparison.name}: {findings.heading(comparison)}"
    note += "".join(f"\n% {sentence}" for sentence in findings.remarks(comparison, [])[:1])
    inner = "\n".join(f"  {line}" for line in [r"\toprule", *body, r"\bottomrule"])
    return f"{note}\n\\begin{{tabular}}{{{spec}}}\n{inner}\n\\end{{tabular}}\n"


def _record(comparison: Comparison, index: int, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {"label": row.label}
    record |= {key: row.values[key] for key in comparison.differing_keys.keys}
    record |= {"seeds": len(row.runs), "states": ", ".join(f"{n} {state}" for state, n in row.states.items())}
    record["baseline"] = index == comparison.baseline
    for metric in comparison.metrics:
        name, estimate, delta = metric.name, row.estimates[metric.name], row.deltas[metric.name]
        record |= {f"{name}{ending}": getattr(estimate, field, None) for ending, field in ESTIMATED.items()}
        record[f"{name}.n"] = estimate.n if estimate else 0
        record |= {f"{name}.{ending}": getattr(delta, field, None) for ending, field in COMPARED.items()}
        record[f"{name}.verdict"] = findings.verdict(metric, delta, comparison.standing) or None
    return record


def _run(comparison: Comparison, row: Row, run: ComparedRun) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in RUN_FIELDS},
        "parent": None if run.lineage is None else run.lineage.name,
        "parent_step": None if run.lineage is None else run.lineage.step,
        **{metric.name: row.numbers[metric.name].get(run.seed) for metric in comparison.metrics},
    }


def _cell_text(cell: Cell, *, baseline: bool) -> str:
    if baseline or not cell.change:
        return cell.value
    mark = f", {cell.mark}" if cell.verdict and "%" not in cell.change else ""
    return f"{cell.value} ({cell.change}{mark})"


def _latex_cell(cell: Cell, *, baseline: bool) -> str:
    if baseline or not cell.change or cell.verdict == "no interval":
        return _latex(cell.value)
    text = _latex(cell.value)
    return rf"\textbf{{{text}}}" if cell.verdict == "better" else text


_LATEX = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "−": "$-$", "—": "---", "<": r"\textless{}", ">": r"\textgreater{}"}
)


def _latex(text: str) -> str:
    return text.translate(_LATEX)
