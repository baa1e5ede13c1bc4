"""Continued runs: rows joined with their parents', own speed and cost, cost with parents, lineage in every output."""

import json
import shutil
from pathlib import Path

import pytest

from tests.compare.made_runs import make_run, rows
from titan_exp.cli.main import main
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.from_wandb import _lineage
from titan_exp.compare.output.formats import json_values
from titan_exp.compare.output.plots import draw
from titan_exp.compare.output.study_sections import cost_metric, pareto
from titan_exp.compare.runs import read_run, select
from titan_exp.config.command_line.output import json_text
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_lookup import find_runs
from titan_exp.launch.run_status import status_rows
from titan_exp.tracking.run_folder.run import Lineage, ancestors, children, read_history


@pytest.fixture
def family(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run of 40 steps and 40 s at 5000 tokens/s; one continued at its step 20 to 50 on two processes in 15 s at 9000;
    one continued from that at step 30 to 60 in 60 s at 1000."""
    first = make_run(tmp_path, metrics=rows(3.0, steps=40), seconds=40.0)
    after = [row for row in rows(2.5, steps=50, speed=9000.0) if row["step"] > 20]
    middle = make_run(tmp_path, {"training.steps": 50}, metrics=after, seconds=15.0, world_size=2)
    Lineage(str(first), 20, 20_000).write(middle)
    after = [row for row in rows(2.0, steps=60, speed=1000.0, more={"memory": 1.0}) if row["step"] > 30]
    last = make_run(tmp_path, {"training.steps": 60}, metrics=after, seconds=60.0)
    Lineage(str(middle), 30, 30_000).write(last)
    return first, middle, last


def number(found: Comparison, row: int, name: str) -> float | None:
    estimate = found.rows[row].estimates[name]
    return None if estimate is None else estimate.mean


def test_rows_join_and_speed_is_its_own(family: tuple[Path, Path, Path]):
    run = read_run(family[2])
    assert [row["step"] for row in run.rows] == list(range(1, 61))
    assert run.begins == 30_000
    found = compare(select([str(path) for path in family], family[0].parents[1]), at="end")
    assert [number(found, row, "tokens_per_second") for row in range(3)] == [5000, 9000, 1000]
    assert [number(found, row, "memory") for row in range(3)] == [2.0, 2.0, 1.0]


def test_cost_is_its_own_and_with_parents(family: tuple[Path, Path, Path]):
    found = compare(select([str(path) for path in family], family[0].parents[1]), at="end")
    hour = pytest.approx
    assert [number(found, row, "gpu_hours") for row in range(3)] == [hour(40 / 3600), hour(30 / 3600), hour(60 / 3600)]
    assert [number(found, row, "time") for row in range(3)] == [hour(40 / 3600), hour(15 / 3600), hour(60 / 3600)]
    with_parents = [40, 20 + 30, 20 + 10 + 60]
    assert [number(found, row, "gpu_hours_with_parents") for row in range(3)] == [hour(s / 3600) for s in with_parents]
    assert cost_metric(found).title == "GPU-hours with parents"
    assert sorted(point.gpu_hours for point in pareto(found)) == [hour(s / 3600) for s in with_parents]


def test_cost_at_a_budget(family: tuple[Path, Path, Path]):
    first, *_ = family
    found = compare(select([str(path) for path in family], first.parents[1]), at="40000")
    # Of 30 s for 30 steps of the middle run 20 come before step 40, of 60 s for 30 steps of the last one 10.
    seconds = {"gpu_hours": [40, 20, 20], "gpu_hours_with_parents": [40, 40, 50]}
    for name, expected in seconds.items():
        assert [number(found, row, name) for row in range(3)] == [pytest.approx(s / 3600) for s in expected]
    before = compare(select([str(path) for path in family], first.parents[1]), at="10000")
    assert [number(before, row, "gpu_hours_with_parents") for row in range(3)] == [pytest.approx(10 / 3600)] * 3
    assert number(before, 2, "tokens_per_second") == 1000
    assert number(before, 2, "gpu_hours") is None


def test_a_parent_elsewhere_has_no_rows_and_an_unknown_cost(family: tuple[Path, Path, Path]):
    first, _, last = family
    shutil.rmtree(first)
    run = read_run(last)
    assert [row["step"] for row in run.rows] == list(range(21, 61))
    found = compare(select([str(last)], last.parents[1]), at="end")
    assert number(found, 0, "gpu_hours") == pytest.approx(60 / 3600)
    assert found.rows[0].estimates.get("gpu_hours_with_parents") is None
    assert [ancestor.lineage.step for ancestor in ancestors(last)] == [30, 20]


def test_runs_that_were_moved_together(family: tuple[Path, Path, Path], tmp_path: Path):
    first, middle, last = family
    shutil.move(tmp_path / "made", tmp_path / "elsewhere" / "made")
    moved = tmp_path / "elsewhere" / "made"
    assert [row["step"] for row in read_history(moved / last.name)] == list(range(1, 61))
    assert children(moved / first.name) == [(moved / middle.name, Lineage(str(first), 20, 20_000))]
    assert children(moved / last.name) == []


def test_a_circle_ends(family: tuple[Path, Path, Path]):
    first, _, last = family
    Lineage(str(last), 5, 5000).write(first)
    assert [ancestor.lineage.step for ancestor in ancestors(last)] == [30, 20]


def test_a_damaged_file_is_named(family: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]):
    first, middle, _ = family
    (middle / "lineage.json").write_text('{"parent": 1}')
    with pytest.raises(UserError, match=r"lineage\.json is damaged"):
        Lineage.read(middle)
    assert children(first) == []
    (row,) = status_rows(find_runs([str(middle)], middle.parents[1]))
    assert (row.parent, row.state) == (None, "done")
    assert main(["show", str(middle)]) == 2
    assert "Remove it" in capsys.readouterr().err


def test_lineage_in_outputs(family: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]):
    first, middle, last = family
    found = json.loads(json_text(json_values(compare(select([str(path) for path in family], first.parents[1])))))
    runs = [run for row in found["rows"] for run in row["runs"]]
    assert [(run["parent"], run["parent_step"]) for run in runs] == [
        (None, None),
        (f"made/{first.name}", 20),
        (f"made/{middle.name}", 30),
    ]
    assert f"{last.name} was continued from made/{middle.name} after step 30." in found["remarks"]
    assert any("`GPU-hours with parents` adds" in remark for remark in found["remarks"])
    alone = json.loads(json_text(json_values(compare(select([str(first)], first.parents[1])))))
    assert "gpu_hours_with_parents" not in {metric["name"] for metric in alone["metrics"]}
    assert not any("parents" in remark for remark in alone["remarks"])
    assert main(["status", f"paths.runs={first.parents[1]}", "made"]) == 0
    assert f"made/{middle.name} at 30" in capsys.readouterr().out
    assert main(["status", f"paths.runs={first.parents[1]}", "made", "--json"]) == 0
    parents = {row["run_id"]: (row["parent"], row["parent_step"]) for row in json.loads(capsys.readouterr().out)}
    assert parents[last.name] == (f"made/{middle.name}", 30)
    assert parents[first.name] == (None, None)


def test_a_plot_has_its_own_speed_and_marks_where_it_begins(family: tuple[Path, Path, Path], monkeypatch):
    from matplotlib.figure import Figure

    texts, lines = [], []
    text = Figure.text
    monkeypatch.setattr(Figure, "text", lambda self, *where, **how: texts.append(where[2]) or text(self, *where, **how))
    monkeypatch.setattr("matplotlib.axes.Axes.axvline", lambda self, x, label=None, **_: lines.append((x, label)))
    short = [row for row in rows(2.0, steps=36, speed=1000.0) if row["step"] > 30]
    last = make_run(family[0].parents[1], {"training.steps": 36}, metrics=short)
    Lineage(str(family[1]), 30, 30_000).write(last)
    draw(last)
    assert any("step 36" in found and "1k tokens/s" in found for found in texts)
    assert [line for line in lines if line[1] == "continued"] == [(30, "continued")] * 3
    assert {line[0] for line in lines} == {30, 20}


def test_lineage_of_a_run_on_wandb():
    identity = {"parent": "first/abc", "parent_step": 20, "parent_tokens": 20_000}
    assert _lineage(identity) == Lineage("first/abc", 20, 20_000)
    assert _lineage({"parent": "first/abc"}) is None
