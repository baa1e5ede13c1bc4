import math
import os
import random
from pathlib import Path
from statistics import fmean

import matplotlib.image
import numpy as np
import pytest

from titan_exp.compare.output.plots import draw
from titan_exp.compare.statistics import moving_average
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink, last_fiftieth


def run(tmp_path: Path, *rows: dict) -> Path:
    folder = tmp_path / "first" / "3f2a"
    folder.mkdir(parents=True, exist_ok=True)
    sink = JsonlSink(folder / "metrics.jsonl", attempt=1)
    for row in rows:
        sink.log(row)
    sink.close("done")
    return folder


def row(step: int, **also: float | None) -> dict:
    loss = 1.5 + 4 * math.exp(-step / 60)
    known = {"step": step, "tokens": step * 1000, "loss": loss, "grad_norm": 0.5, "lr": 3e-3, "tokens_per_second": 5.0}
    return {**known, **also}


def colors(path: Path) -> set[tuple[int, ...]]:
    """Quantized colours of the plot."""
    image = matplotlib.image.imread(path)[..., :3]
    codes = np.unique((image * 7.99).astype(int) @ (64, 8, 1)).tolist()  # a set of a million tuples takes seconds
    return {(code // 64, code // 8 % 8, code % 8) for code in codes}


BLUE, ORANGE = (1, 3, 5), (6, 3, 1)
"""Colours of training and validation in `colors`."""


def test_plot_with_validation(tmp_path: Path) -> None:
    rows = [row(step, validation_loss=1.6 if step % 20 == 0 else None) for step in range(1, 101)]
    folder = run(tmp_path, *rows)
    path = draw(folder)
    assert path == folder / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {BLUE, ORANGE} <= colors(path)
    # Written whole: nothing temporary is left.
    assert sorted(entry.name for entry in folder.iterdir()) == ["loss.png", "metrics.jsonl"]


@pytest.mark.parametrize("count", [1, 2, 20, 51, 1000])
def test_a_smoothed_curve_ends_at_the_loss_of_the_title(count: int) -> None:
    noise = random.Random(0)
    losses = [2 + 4 * math.exp(-place / (count / 6)) + noise.gauss(0, 0.1) for place in range(count)]
    smoothed = moving_average(losses)
    assert smoothed[-1] == pytest.approx(fmean(last_fiftieth(losses)))
    if count == 1000:
        # At both ends the curve is as far from the single batches as between them.
        exact = [2 + 4 * math.exp(-place / (count / 6)) for place in range(count)]
        errors = [abs(found - true) for found, true in zip(smoothed, exact, strict=True)]
        assert max(errors[:5]) < 0.09
        assert max(errors[-5:]) < 0.06
        assert max(errors) < 0.1


def test_plot_without_validation(tmp_path: Path) -> None:
    found = colors(draw(run(tmp_path, *(row(step) for step in range(1, 31)))))
    assert BLUE in found
    assert ORANGE not in found


@pytest.mark.parametrize(
    "rows",
    [
        [row(1)],
        [row(10, validation_loss=2.0)],
        [{"step": 3}],
        [{"step": 0, "validation_loss": 5.0}, row(1)],
        [row(1), row(2, loss=math.nan), row(3, loss=math.inf), row(4)],
        [row(step, loss=math.nan, grad_norm=math.nan, lr=0.0) for step in range(1, 40)],
        [row(step, loss=None, grad_norm=None, tokens=None, tokens_per_second=None) for step in range(1, 40)],
        [row(1, attempt=1), row(2, attempt=2), row(3, attempt=3)],
        [row(1, grad_norm=1e30, lr=1e-12)],
    ],
    ids=["one row", "only evaluated", "only a step", "step 0", "NaN", "all NaN", "all unknown", "resumed", "extreme"],
)
def test_unusual_runs_are_drawn(tmp_path: Path, rows: list[dict]) -> None:
    assert draw(run(tmp_path, *rows)).stat().st_size > 1000


def test_steps_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    rows = [row(step, loss=math.nan if step in (40, 41) else 2.0) for step in range(1, 60)]
    assert any(red > 5 and green < 5 and blue < 5 for red, green, blue in colors(draw(run(tmp_path, *rows))))
    rows = [row(step) for step in range(1, 60)]
    assert not any(red > 5 and green < 5 and blue < 5 for red, green, blue in colors(draw(run(tmp_path / "b", *rows))))


def test_drawing_again_replaces_the_picture(tmp_path: Path) -> None:
    folder = run(tmp_path, row(1))
    before = draw(folder).read_bytes()
    run(tmp_path, row(2), row(3))
    assert draw(folder).read_bytes() != before


def test_the_folder_may_be_named_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path, row(1))
    monkeypatch.chdir(folder)
    assert draw(Path()).exists()


@pytest.mark.parametrize("there", ["nothing", "a folder", "an empty file"])
def test_run_without_rows_is_refused(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "empty"
    if there != "nothing":
        folder.mkdir()
    if there == "an empty file":
        (folder / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"is missing or empty"):
        draw(folder)


def test_no_display_and_no_global_state_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "not_a_backend")
    assert draw(run(tmp_path, row(1))).exists()
    assert os.environ["MPLBACKEND"] == "not_a_backend"
