"""Comparison as Markdown, CSV, LaTeX and JSON."""

import csv
import io
import json
import math
from dataclasses import asdict
from typing import Any

from titan_exp.compare.comparison import Comparison
from titan_exp.compare.findings import findings, heading, remarks, stands_for, verdict
from titan_exp.compare.layout_check import layout_checks
from titan_exp.compare.output.study_sections import markdown, sections
from titan_exp.compare.output.table import Cell, text_table, title
from titan_exp.compare.row import Row
from titan_exp.compare.run_record import Run
from titan_exp.compare.stats.pareto import pareto
from titan_exp.compare.stats.scaling_efficiency import scaling

RUN_FIELDS = (
    *("run_id", "experiment_id", "seed", "state", "reason", "step", "tokens", "world_size"),
    *("commit", "dirty", "source"),
)
"""Fields of a run in the JSON output."""


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """One flat dictionary per row, for a data frame: full keys, and plain numbers for every metric.

    A metric NAME gives NAME, NAME.low, NAME.high, NAME.n, and against the baseline NAME.delta, NAME.delta_low,
    NAME.delta_high, NAME.p, NAME.p_holm and NAME.verdict. Unknown numbers are None.
    """
    return [_record(comparison, index, row) for index, row in enumerate(comparison.rows)]


def to_csv(comparison: Comparison) -> str:
    """`records` as CSV with a header; numbers are exact."""
    found = records(comparison)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return out.getvalue()


def to_json(comparison: Comparison) -> str:
    """Comparison as JSON, without curves."""
    study = comparison.study
    checks = layout_checks(comparison.runs)
    value = {
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
            {"label": row.label, **record, "runs": [_run(comparison, row, run) for run in row.runs]}
            for row, record in zip(comparison.rows, records(comparison), strict=True)
        ],
        "tuning": None if comparison.tuning is None else asdict(comparison.tuning),
        "learnt": None if comparison.learnt is None else asdict(comparison.learnt),
        "scaling": [asdict(series) for series in scaling(comparison)],
        "pareto": [asdict(point) for point in pareto(comparison)],
        "layout_checks": [{**asdict(check), "holds": check.holds} for check in checks],
        "findings": findings(comparison),
        "remarks": [*stands_for(comparison), *remarks(comparison, checks)],
    }
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_markdown(comparison: Comparison) -> str:
    """Comparison as GitHub Markdown: table, findings, remarks."""
    found = text_table(comparison)
    heads = [*found.keys, *["n"][: found.has_seeds], *["state"][: found.has_states]]
    lines = [
        [
            *(*row.keys, *[str(row.n)][: found.has_seeds], *[row.state][: found.has_states]),
            *(_cell_text(cell, baseline=row.is_baseline) for cell in row.cells),
        ]
        for row in found.rows
    ]
    rule = ["---"] * len(heads) + ["--:"] * len(found.metrics)
    table = [[*heads, *map(title, found.metrics)], *lines]
    rows = ["| " + " | ".join(map(_markdown, line)) + " |" for line in table]
    rows.insert(1, "|" + "|".join(rule) + "|")
    question = [comparison.study.question, ""] if comparison.study and comparison.study.question else []
    sentences = [*findings(comparison), *stands_for(comparison), *remarks(comparison, layout_checks(comparison.runs))]
    head = [f"## {_markdown(comparison.name)}", "", *map(_markdown, question), _markdown(heading(comparison)), ""]
    added = markdown(sections(comparison), _markdown)
    return "\n".join([*head, *rows, "", *added, *(f"- {_markdown(sentence)}" for sentence in sentences)]) + "\n"


def to_latex(comparison: Comparison) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`; better values are bold."""
    found = text_table(comparison)
    spec = "l" * len(found.keys) + "r" * (found.has_seeds + len(found.metrics))
    lines = [
        [*map(_latex, found.keys), *["$n$"][: found.has_seeds], *(_latex(title(metric)) for metric in found.metrics)]
    ]
    for row in found.rows:
        cells = [_latex_cell(cell, baseline=row.is_baseline) for cell in row.cells]
        lines.append([*map(_latex, row.keys), *[str(row.n)][: found.has_seeds], *cells])
    body = [" & ".join(line) + r" \\" for line in lines]
    body = [body[0], r"\midrule", *body[1:]]
    note = f"% {comparison.name}: {heading(comparison)}"
    inner = "\n".join(f"  {line}" for line in [r"\toprule", *body, r"\bottomrule"])
    return f"{note}\n\\begin{{tabular}}{{{spec}}}\n{inner}\n\\end{{tabular}}\n"


def plain(value: Any) -> Any:
    """Convert to JSON values: non-finite numbers become None, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return dict(value) if hasattr(value, "keys") else value


def _record(comparison: Comparison, index: int, row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {key: row.values[key] for key in comparison.differing_keys.keys}
    record |= {"seeds": len(row.runs), "states": ", ".join(f"{n} {state}" for state, n in row.states.items())}
    record["baseline"] = index == comparison.baseline
    for metric in comparison.metrics:
        name, estimate, delta = metric.name, row.estimates[metric.name], row.deltas[metric.name]
        record |= {
            name: estimate.mean if estimate else None,
            f"{name}.low": estimate.low if estimate else None,
            f"{name}.high": estimate.high if estimate else None,
            f"{name}.n": estimate.n if estimate else 0,
            f"{name}.delta": delta.difference if delta else None,
            f"{name}.delta_low": delta.low if delta else None,
            f"{name}.delta_high": delta.high if delta else None,
            f"{name}.p": delta.p if delta else None,
            f"{name}.p_holm": delta.p_holm if delta else None,
            f"{name}.verdict": verdict(metric, delta) or None,
        }
    return record


def _run(comparison: Comparison, row: Row, run: Run) -> dict[str, Any]:
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


def _markdown(text: str) -> str:
    for character in "\\|*_`":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "&lt;").replace("\n", " ")


_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "−": "$-$",
        "—": "---",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
)


def _latex(text: str) -> str:
    return text.translate(_LATEX)
