import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console

from tests.compare.made_runs import make_run, make_study, rows
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.output.formats import json_values, records, to_csv, to_latex, to_markdown
from titan_exp.compare.output.pages import show
from titan_exp.compare.runs import select
from titan_exp.config.command_line.output import json_text

NASTY = "a|b_c & 50% of {x} <i> \\y"


@pytest.fixture
def made(tmp_path: Path) -> Comparison:
    make_study(tmp_path, {0.001: [3.0, 3.1, 3.2], 0.003: [2.5, 2.61, 2.69]})
    make_run(tmp_path, {"optimizer.lr": 0.003, "parallelism.tp": 2}, metrics=rows(2.5, speed=9000.0), world_size=2)
    make_run(tmp_path, {"optimizer.lr": 0.1}, state="failed", reason="it broke")
    return compare(select(["made"], tmp_path))


def nasty(tmp_path: Path) -> Comparison:
    for text in (NASTY, "plain"):
        make_run(tmp_path, {"data.subset": text}, metrics=rows(3.0))
    return compare(select(["made"], tmp_path))


def test_csv_has_exact_numbers(made: Comparison):
    lines = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert [line["optimizer.lr"] for line in lines] == ["0.001", "0.003", "0.1", "0.003"]
    assert float(lines[1]["loss.delta"]) == pytest.approx(-0.5)
    assert lines[1]["loss.verdict"] == "different"
    assert lines[2]["loss"] == ""
    assert lines[2]["states"] == "1 failed"
    assert lines[3]["parallelism.tp"] == "2"


def test_records_fit_a_data_frame(made: Comparison):
    frame = pandas.DataFrame(records(made))
    assert min(frame["validation_loss"].dropna().tolist()) == pytest.approx(2.6)
    assert list(frame["baseline"]) == [True, False, False, False]


def test_json_is_complete(made: Comparison):
    found = json.loads(json_text(json_values(made)))
    assert found["keys"] == ["parallelism.tp", "optimizer.lr"]
    assert found["rows"][0]["runs"][0]["loss"] == 3.0
    assert found["rows"][2]["runs"][0]["state"] == "failed"
    assert found["scaling"][0]["points"][1]["speedup"] == pytest.approx(1.8)
    assert found["layout_checks"][0]["holds"] is True
    assert any("it broke" in sentence for sentence in found["remarks"])


def test_json_has_no_non_finite_numbers(tmp_path: Path):
    broken = [*rows(2.0)[:-1], {**rows(2.0)[-1], "loss": math.nan}]
    make_run(tmp_path, {}, metrics=broken)
    text = json_text(json_values(compare(select(["made"], tmp_path), at="end")))

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


def test_markdown_is_one_table(made: Comparison):
    lines = to_markdown(made).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 6
    assert len({line.count("|") for line in table}) == 1
    assert "−0.5000 [−0.5248, −0.4752], differs" in table[3]


def test_markdown_and_latex_escape_markup(tmp_path: Path):
    found = nasty(tmp_path)
    row = next(line for line in to_markdown(found).splitlines() if "50%" in line)
    assert r"a\|b\_c & 50% of {x} &lt;i> \\y" in row
    assert r"a|b\_c \& 50\% of \{x\} \textless{}i\textgreater{} \textbackslash{}y" in to_latex(found)


def test_latex_is_a_tabular(made: Comparison):
    text = to_latex(made)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    columns = text.split(r"\begin{tabular}{")[1].split("}")[0]
    assert {line.count("&") for line in lines} == {len(columns) - 1}
    assert r"\textbf" not in text, "a better value is bold, which takes a registered question"


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_the_terminal_wraps_no_number(made: Comparison, width: int):
    out = io.StringIO()
    show(made, Console(file=out, width=width, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "−0.5000 [−0.5248, −0.4752]" in text
    assert "…" not in text
    assert "1.80" in text


def test_terminal_escapes_markup(tmp_path: Path):
    for text in ("[bold]x[/bold]", "y"):
        make_run(tmp_path, {"data.subset": text}, metrics=rows(3.0))
    out = io.StringIO()
    show(compare(select(["made"], tmp_path)), Console(file=out, width=200))
    assert "subset=[bold]x[/bold]" in out.getvalue()
