"""Outcome of searches and of successive halving, from made-up runs and a study record."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compare.made_runs import make_run, rows
from titan_exp.cli.main import main
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.output.formats import json_values
from titan_exp.compare.output.plots import study_plots
from titan_exp.compare.runs import select
from titan_exp.compare.study_outcome import Learnt
from titan_exp.config.command_line.output import json_text
from titan_exp.tracking.run_folder.run import Lineage

RATES = {1e-4: 4.0, 1e-3: 3.0, 3e-3: 2.8, 1e-2: 2.9, 5e-2: 3.5, 9e-2: 5.0}
"""Loss of the first rung, of 10 steps, by learning rate; of the second, of 30, half a nat less; but 1e-2 wins it."""
WHOLE = {"training.steps": 30, "training.global_batch_size": 10, "training.seq_len": 100}
"""1000 tokens a step, as the rows have them."""
RANGE = {"optimizer.lr": {"kind": "log_uniform", "low": 1e-4, "high": 1e-1}}


def record(runs: Path, points: list[tuple[Path, float, int]], **also: Any) -> None:
    """Write the study record of runs with their learning rate and rung."""
    entries = [
        {"run_id": path.name, "variant": f"lr={rate:g}", "seed": None, "round": rung} for path, rate, rung in points
    ]
    found = {"name": "made", "question": "Which rate?", "points": entries, "metrics": {"validation_loss": "min"}}
    (runs / "made" / "study.json").write_text(json.dumps({**found, "parameters": RANGE, **also}))


def halved(runs: Path) -> list[tuple[Path, float, int]]:
    points = []
    for rate, loss in RATES.items():
        values = {"optimizer.lr": rate, "training.stop_after": 10, **WHOLE}
        points.append((make_run(runs, values, metrics=rows(loss, steps=10), seconds=10.0), rate, 1))
    for rate, loss in ((3e-3, 2.4), (1e-2, 2.2)):
        parent = next(path for path, other, _ in points if other == rate)
        values = {"optimizer.lr": rate, "checkpoint.continue_from": f"made/{parent.name}", **WHOLE}
        later = [row for row in rows(loss, steps=30) if row["step"] > 10]
        path = make_run(runs, values, metrics=later, seconds=20.0)
        Lineage(str(parent), 10, 10_000).write(path)
        points.append((path, rate, 2))
    rounds = {"metric": "validation_loss", "better": "min", "rungs": ["10", "30"], "keep": "1/3"}
    record(runs, points, rounds=rounds)
    return points


def outcome(runs: Path) -> tuple[Comparison, Learnt]:
    found = compare(select(["made"], runs))
    assert found.learnt is not None
    return found, found.learnt


def test_points_of_halving_are_judged_at_their_last_rung(tmp_path: Path):
    halved(tmp_path)
    found, learnt = outcome(tmp_path)
    assert len(found.rows) == 6, "a point is one row, its last run"
    assert [(trial.label, trial.round) for trial in learnt.trials[:3]] == [
        ("lr=0.01", 2),
        ("lr=0.003", 2),
        ("lr=0.001", 1),
    ]
    assert [trial.value for trial in learnt.trials[:3]] == [pytest.approx(value) for value in (2.3, 2.5, 3.1)]
    assert found.rows[found.baseline].label == "lr=0.01"
    assert found.baseline_why.startswith("the best point")
    assert found.differing_keys.keys == ("optimizer.lr",), "rungs are not columns"


def test_parameters_are_judged_where_all_points_are(tmp_path: Path):
    halved(tmp_path)
    _, learnt = outcome(tmp_path)
    (parameter,) = learnt.parameters
    assert [(part.part, part.points) for part in parameter.marginals] == [
        ("0.0001 … 0.001", 2),
        ("0.003 … 0.01", 2),
        ("0.05 … 0.09", 2),
    ]
    assert [part.mean for part in parameter.marginals] == [pytest.approx(mean) for mean in (3.6, 2.95, 4.35)]
    assert (parameter.best, parameter.edge) == ("0.01", "")


def test_cost_counts_every_step_once(tmp_path: Path):
    halved(tmp_path)
    _, learnt = outcome(tmp_path)
    assert learnt.cost.tokens == 6 * 10_000 + 2 * 20_000
    assert learnt.cost.whole_tokens == 6 * 30_000
    assert learnt.cost.gpu_hours == pytest.approx((6 * 10 + 2 * 20) / 3600)
    assert learnt.cost.whole_gpu_hours == pytest.approx(180 / 3600)


def test_a_search_without_rounds(tmp_path: Path):
    points = [
        (make_run(tmp_path, {"optimizer.lr": rate, **WHOLE}, metrics=rows(loss, steps=30)), rate, 1)
        for rate, loss in {1.2e-4: 2.0, 1e-3: 3.0, 1e-2: 4.0}.items()
    ]
    record(tmp_path, points)
    found, learnt = outcome(tmp_path)
    assert [trial.value for trial in learnt.trials] == [pytest.approx(value) for value in (2.1, 3.1, 4.1)]
    assert (learnt.rungs, learnt.parameters[0].edge) == (0, "lower")
    assert found.rows[0].label == "lr=0.00012"


@pytest.mark.parametrize(
    ("best", "edge"), [(1.9e-4, "lower"), (2.2e-4, ""), (4e-2, ""), (6e-2, "upper")], ids=["low", "", "inside", "high"]
)
def test_the_outer_tenths_of_a_range_are_its_edges(tmp_path: Path, best: float, edge: str):
    """On its scale: a tenth of three decades is a factor of two."""
    losses = {1e-3: 3.0, best: 2.0}
    points = [
        (make_run(tmp_path, {"optimizer.lr": rate, **WHOLE}, metrics=rows(loss, steps=30)), rate, 1)
        for rate, loss in losses.items()
    ]
    record(tmp_path, points)
    _, learnt = outcome(tmp_path)
    assert learnt.parameters[0].edge == edge


def test_diverged_points_are_last(tmp_path: Path):
    points = halved(tmp_path)
    reason = "rank 0: Diverged: step 3: loss nan"
    values = {"optimizer.lr": 8e-2, "training.stop_after": 10, **WHOLE}
    path = make_run(tmp_path, values, metrics=rows(3.0, steps=2), state="failed", reason=reason)
    rounds = {"metric": "validation_loss", "better": "min", "rungs": ["10", "30"], "keep": "1/3"}
    record(tmp_path, [*points, (path, 8e-2, 1)], rounds=rounds)
    _, learnt = outcome(tmp_path)
    assert learnt.trials[-1].label == "lr=0.08"
    assert learnt.parameters[0].marginals[-1].diverged == 1


def test_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    halved(tmp_path)
    assert main(["compare", "made", f"paths.runs={tmp_path}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "lr=0.01 2 of 2 2.3000" in text
    assert "Cost: 100k tokens, 0.0278 GPU-hours, 56% of every point to its end (180k tokens" in text
    assert "Validation loss by parameter at the first rung" in text
    assert "8 runs of 2 rungs are 6 points" in text
    assert "was continued from" not in text
    found, _ = outcome(tmp_path)
    assert json.loads(json_text(json_values(found)))["learnt"]["trials"][0]["label"] == "lr=0.01"
    ((title, picture),) = study_plots(found)
    assert (title, picture[:4]) == ("validation loss against each parameter (filled: the best)", b"\x89PNG")
    assert title in (tmp_path / "made" / "compare.html").read_text()
