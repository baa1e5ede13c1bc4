"""Picture of expert load: heat map, file, page; drawn for runs with a record of load, and for no others."""

import base64
import io
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.compare.made_runs import make_run, rows
from titan_exp.cli.main import main
from titan_exp.compare.comparison import compare
from titan_exp.compare.output.pages import to_html
from titan_exp.compare.output.plots import LoadHistory, draw_expert_load, draw_run, heat_map, read_load
from titan_exp.compare.runs import select
from titan_exp.tracking.run_folder.metrics_jsonl import ExpertLoadLog
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder

PIXELS = {"black": (0, 0, 0), "busy": (0.4, 0, 0.12)}


def record(folder: Path, steps: range, *, dead: bool = False) -> Path:
    """Record of two layers of 4 and 8 experts, of which one gets half of the tokens, and one none if `dead`."""
    log = ExpertLoadLog(RunFolder(folder).expert_load, 1, steps=steps[-1], log_every=steps.step)
    for step in steps:
        log.log(step, {"layer_0": [60, 20, 20, 0 if dead else 20], "layer_1": [10] * 7 + [70]})
    log.close("done")
    return folder


def with_experts(runs: Path, lr: float) -> Path:
    more = {"experts/load_max": 1.5 + lr, "experts/dead": 0, "experts/entropy": 0.9, "experts/layer_0/load_max": 1.5}
    more["experts/z_loss"] = 0.1
    return record(make_run(runs, {"optimizer.lr": lr}, metrics=rows(3.0, more=more)), range(10, 101, 10))


def test_experts_are_ordered_by_load_within_their_layer():
    counts = {"layer_0": np.array([[10.0, 30.0], [20.0, 60.0]]), "layer_1": np.array([[1.0, 0, 5], [3, 0, 3]])}
    image, ends = heat_map(LoadHistory(np.array([1.0, 2.0]), counts))
    assert ends == [2, 5]
    assert image.tolist() == [[1.5, 1.5], [0.5, 0.5], [2.5, 1.5], [0.5, 1.5], [0, 0]]


def test_many_layers_are_averaged_to_a_few_rows_each():
    counts = {f"layer_{layer}": np.arange(1, 129, dtype=float)[None] for layer in range(94)}
    image, ends = heat_map(LoadHistory(np.array([1.0]), counts))
    assert image.shape == (94 * 5, 1)
    assert ends[-1] == 94 * 5
    assert np.all(np.diff(image[:5, 0]) < 0)
    assert image.mean() == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("dead", [False, True])
def test_the_picture_shows_busy_and_dead_experts(tmp_path: Path, dead: bool):
    path = draw_expert_load(record(tmp_path, range(1, 21), dead=dead))
    assert path is not None
    assert path == tmp_path / "experts.png"
    image = matplotlib.image.imread(tmp_path / "experts.png")[..., :3]
    # The heat map is below the curves and above the colour bar.
    inside = image[400:950, 200:1200]
    black = np.all(inside < 0.02, axis=-1).mean()
    assert (black > 0.05) == dead
    assert np.all(np.abs(inside - np.array(PIXELS["busy"])) < 0.03, axis=-1).mean() > 0.05


def test_one_step_is_drawn(tmp_path: Path):
    assert draw_expert_load(record(tmp_path, range(1, 2))) is not None


def test_a_continued_run_shows_its_parents_steps(tmp_path: Path):
    parent, child = record(tmp_path / "n" / "a", range(10, 101, 10)), record(tmp_path / "n" / "b", range(60, 121, 10))
    Lineage(str(parent), 50, 1000).write(child)
    history = read_load(child)
    assert history is not None
    assert history.steps.tolist() == [*range(10, 121, 10)]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "n" / name).mkdir(parents=True)


def test_a_dense_run_has_no_picture(tmp_path: Path):
    folder = make_run(tmp_path / "runs", {}, metrics=rows(3.0))
    assert len(list(draw_run(folder))) == 1
    assert not (folder / "experts.png").exists()


def test_show_draws_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = with_experts(tmp_path / "runs", 1e-3)
    assert main(["show", str(folder)]) == 0
    assert not (folder / "experts.png").exists()
    assert main(["show", str(folder), "--plot"]) == 0
    assert f"load of experts: {folder / 'experts.png'}" in capsys.readouterr().out
    assert (folder / "experts.png").exists()
    assert (folder / "loss.png").exists()


def test_the_page_embeds_a_picture_of_each_row(tmp_path: Path):
    runs = tmp_path / "runs"
    for lr in (1e-3, 3e-3):
        with_experts(runs, lr)
    make_run(runs, {"optimizer.lr": 1e-2}, metrics=rows(3.0))
    comparison = compare(select(["made"], runs))
    assert [metric.name for metric in comparison.metrics if metric.name.startswith("experts/")] == [
        "experts/load_max",
        "experts/dead",
        "experts/entropy",
    ]
    found = re.findall(
        r'<img src="data:image/png;base64,([^"]+)" alt="load of experts over steps, ([^"]+)"', to_html(comparison)
    )
    assert [label for _, label in found] == [row.label for row in comparison.rows[:2]]
    assert matplotlib.image.imread(io.BytesIO(base64.b64decode(found[0][0]))).shape[0] > 300


def test_metrics_of_experts_are_means_of_the_last_rows(tmp_path: Path):
    folder = with_experts(tmp_path / "runs", 1e-3)
    comparison = compare(select([str(folder)], tmp_path), metrics=["experts/load_max", "experts/layer_0/load_max"])
    (row,) = comparison.rows
    assert {name: list(numbers.values()) for name, numbers in row.numbers.items()} == {
        "experts/load_max": [pytest.approx(1.501)],
        "experts/layer_0/load_max": [1.5],
    }
