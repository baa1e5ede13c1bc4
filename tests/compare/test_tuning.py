"""Tuned comparison: each optimizer at the best of its own grid, by the mean over seeds, with made-up runs."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.compare.made_runs import make_run, rows
from titan_exp.cli.main import main
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.output.formats import json_values, to_markdown
from titan_exp.compare.output.pages import to_html
from titan_exp.compare.output.plots import study_plots
from titan_exp.compare.runs import select
from titan_exp.config.command_line.output import json_text
from titan_exp.config.errors.user_error import UserError

LOSSES = {
    # The luckiest run of all is seed 0 of beta 0.8 at 0.003, whose mean is worse than that of 0.001.
    (0.9, 0.001): [2.50, 2.52, 2.54],
    (0.9, 0.003): [2.40, 2.42, 2.44],
    (0.9, 0.01): [2.60, 2.62, 2.64],
    (0.8, 0.001): [2.30, 2.32, 2.34],
    (0.8, 0.003): [2.20, 2.60, 2.61],
}
"""Final losses of three seeds, by optimizer (here: its first beta) and learning rate."""


def make(runs: Path, losses: dict[tuple[float, float], list[float]], **also) -> None:
    for (beta, rate), by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            values = {"optimizer.betas": [beta, 0.95], "optimizer.lr": rate, "experiment.seed": seed}
            speed = 5000.0 if beta == 0.9 else 2500.0
            make_run(runs, values, metrics=rows(loss, speed=speed), **also)


BASELINE = "lr=0.003 betas=[0.9,0.95]"


def compared(runs: Path, *, tuned: str = "lr", baseline: str = BASELINE, **options) -> Comparison:
    return compare(select(["made"], runs), baseline=baseline, tuned=tuned, **options)


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    make(tmp_path, LOSSES)
    return compared(tmp_path)


def test_the_best_rate_is_that_of_the_best_mean(found: Comparison):
    assert found.tuning is not None
    first, second = found.tuning.groups
    assert (first.label, second.label) == ("betas=[0.8,0.95]", "betas=[0.9,0.95]")
    assert first.best is not None
    assert second.best is not None
    assert (first.best.value, second.best.value) == (0.001, 0.003)
    assert (first.edge, second.edge) == ("lowest", "")
    assert (first.is_baseline, second.is_baseline) == (False, True)
    assert first.delta is not None
    assert (first.delta.difference, first.delta.n, first.delta.pairing) == (pytest.approx(-0.1), 3, "paired")
    assert [point.value for point in second.points] == [0.001, 0.003, 0.01]


def test_steps_and_time_to_the_baselines_loss(found: Comparison):
    """The losses fall alike, so that the better one is below the other's last loss by the time that it has 0.1 to go;
    at half the speed that takes longer."""
    assert found.tuning is not None
    first, second = found.tuning.groups
    assert second.steps.estimate is not None
    assert first.steps.estimate is not None
    assert first.seconds.estimate is not None
    assert second.seconds.estimate is not None
    assert (second.steps.reached, second.steps.of) == (3, 3)
    assert 42 <= second.steps.estimate.mean <= 47
    assert 2 <= second.steps.estimate.mean - first.steps.estimate.mean <= 4
    assert first.seconds.estimate.mean == pytest.approx(first.steps.estimate.mean * 1000 / 2500)
    assert second.seconds.estimate.mean == pytest.approx(second.steps.estimate.mean * 1000 / 5000)


def test_time_counts_rare_and_expensive_steps(tmp_path: Path):
    """Every tenth step of one optimizer takes eleven times as long, as a power iteration does: twice the time."""
    for beta in (0.9, 0.8):
        for rate in (0.001, 0.003):
            metrics = rows(2.4)
            for row in metrics:
                if beta == 0.8 and row["step"] % 10 == 0:
                    row["tokens_per_second"] /= 11
            values = {"optimizer.betas": [beta, 0.95], "optimizer.lr": rate}
            make_run(tmp_path, values, metrics=metrics)
    tuning = compared(tmp_path).tuning
    assert tuning is not None
    found = {group.label: group.seconds.estimate for group in tuning.groups}
    plain, slow = found["betas=[0.9,0.95]"], found["betas=[0.8,0.95]"]
    assert plain is not None
    assert slow is not None
    assert slow.mean / plain.mean == pytest.approx(2, rel=0.1)


def test_time_weighs_rows_by_their_tokens(tmp_path: Path):
    """Steps of a fifth of a second whose batches grow fourfold half-way: time to the last loss is that of the steps."""
    for beta in (0.9, 0.8):
        for rate in (0.001, 0.003):
            metrics = rows(2.4)
            for row in metrics:
                if row["step"] > 25:
                    row["tokens"] += 3000 * (row["step"] - 25)
                    row["tokens_per_second"] *= 4
            values = {"optimizer.betas": [beta, 0.95], "optimizer.lr": rate}
            make_run(tmp_path, values, metrics=metrics)
    tuning = compared(tmp_path).tuning
    assert tuning is not None
    for group in tuning.groups:
        assert group.steps.estimate is not None
        assert group.seconds.estimate is not None
        assert group.seconds.estimate.mean == pytest.approx(group.steps.estimate.mean / 5, rel=0.05), group.label


def test_a_worse_group_does_not_reach_it(tmp_path: Path):
    losses = {(0.9, 0.003): [2.4, 2.4], (0.9, 0.01): [2.5, 2.5], (0.8, 0.003): [2.6, 2.3], (0.7, 0.003): [3.0, 3.0]}
    make(tmp_path, losses)
    tuning = compared(tmp_path).tuning
    assert tuning is not None
    reached = {group.label: (group.steps.reached, group.edge) for group in tuning.groups}
    assert reached == {
        "betas=[0.9,0.95]": (2, "lowest"),
        "betas=[0.8,0.95]": (1, "one value"),
        "betas=[0.7,0.95]": (0, "one value"),
    }


def test_an_interval_ends_with_the_run(tmp_path: Path):
    """Two seeds that reach it far apart: Student's t with one degree of freedom would go on for hundreds of steps."""
    make(tmp_path, {(0.9, 0.003): [2.4, 2.4], (0.9, 0.01): [2.5, 2.5], (0.8, 0.003): [2.39, 1.8]})
    found = compared(tmp_path)
    assert found.tuning is not None
    best = found.tuning.groups[0]
    assert best.steps.estimate is not None
    assert best.seconds.estimate is not None
    assert 30 < best.steps.estimate.mean < 50
    assert (best.steps.estimate.low, best.steps.estimate.high) == (0, 50)
    assert best.seconds.estimate.high == pytest.approx(50 * 1000 / 2500)
    said = to_markdown(found)
    assert "[0, 50]" in said
    assert "those of steps and time end with the longest run" in said


def test_a_value_that_diverged_with_a_seed_is_not_the_best(tmp_path: Path):
    make(tmp_path, {(0.9, 0.001): [2.5, 2.5], (0.9, 0.003): [2.4, 2.4], (0.9, 0.01): [2.0]})
    values = {"optimizer.betas": [0.9, 0.95], "optimizer.lr": 0.01, "experiment.seed": 1}
    make_run(tmp_path, values, metrics=[*rows(2.0)[:-1], {**rows(2.0)[-1], "loss": float("nan")}])
    tuning = compared(tmp_path, metrics=("loss",), baseline="lr=0.003").tuning
    assert tuning is not None
    (group,) = tuning.groups
    assert group.best is not None
    assert (group.best.value, group.points[-1].diverged, group.edge) == (0.003, 1, "")


def test_both_edges_of_a_grid_are_named(tmp_path: Path):
    losses = {
        **{(0.9, rate): [loss, loss] for rate, loss in ((0.001, 2.4), (0.003, 2.5), (0.01, 2.6))},
        **{(0.8, rate): [loss, loss] for rate, loss in ((0.001, 2.6), (0.003, 2.5), (0.01, 2.3))},
        **{(0.7, rate): [loss, loss] for rate, loss in ((0.001, 2.6), (0.003, 2.2), (0.01, 2.3))},
    }
    make(tmp_path, losses)
    found = compared(tmp_path)
    assert found.tuning is not None
    edges = {group.label: group.edge for group in found.tuning.groups}
    assert edges == {"betas=[0.9,0.95]": "lowest", "betas=[0.8,0.95]": "highest", "betas=[0.7,0.95]": ""}
    said = to_markdown(found)
    assert "betas=[0.9,0.95]: the best lr is the lowest that was tried; try lower ones." in said
    assert "betas=[0.8,0.95]: the best lr is the highest that was tried; try higher ones." in said
    assert "betas=[0.7,0.95]: the best lr" not in said


def test_differences_are_corrected_over_all_groups(tmp_path: Path):
    better = {
        (beta, 0.003): [2.3 + noise, 2.32, 2.34 - noise] for beta, noise in ((0.8, 0.02), (0.7, 0.01), (0.6, 0.0))
    }
    make(tmp_path, {(0.9, 0.003): [2.40, 2.42, 2.45], (0.9, 0.001): [2.5, 2.5, 2.5], **better})
    tuning = compared(tmp_path).tuning
    assert tuning is not None
    deltas = [group.delta for group in tuning.groups if group.delta is not None]
    assert len(deltas) == 3
    corrected = sorted(delta.p_holm / delta.p for delta in deltas if delta.p and delta.p_holm)
    assert corrected[-1] == pytest.approx(3), "the smallest p-value of three"


def test_outputs_name_the_edge_and_the_seeds(found: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--baseline", "lr=0.003 betas=[0.9,0.95]", "--tune", "lr", "--html=none"]
    assert main(["compare", "made", f"paths.runs={tmp_path}", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Each at its best lr" in text
    assert "0.001 (lowest)" in text
    assert "betas=[0.8,0.95]: the best lr is the lowest that was tried; try lower ones." in text
    assert "over its seeds (3 seeds for each value)" in text
    assert "−0.1000" in text
    assert "### Each at its best lr" in to_markdown(found)
    groups = json.loads(json_text(json_values(found)))["tuning"]["groups"]
    assert (groups[0]["label"], groups[0]["best"]["value"]) == ("betas=[0.8,0.95]", 0.001)
    ((title, picture),) = study_plots(found)
    assert title == "validation loss against lr (filled: the best)"
    assert picture.startswith(b"\x89PNG")
    page = to_html(found)
    assert "Each at its best lr" in page
    assert page.count("data:image/png") == 1


@pytest.mark.parametrize("key", ["lr", "decay"])
@pytest.mark.parametrize("count", [3, 12])
def test_names_in_plots_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, key: str):
    long = "my_package.schedules.inverse_square_root_with_a_very_long_name_{}"
    for number in range(count):
        for lr in (0.001, 0.003):
            more = {"lr": {"data.subset": f"a name {'with more words ' * number}"}, "decay": {}}[key]
            values = {"lr_schedule.decay": long.format(number), **more}
            make_run(tmp_path, {**values, "optimizer.lr": lr}, metrics=rows(2 + number / 10 + lr))
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    found = compare(select(["made"], tmp_path), tuned=key)
    list(study_plots(found))
    (figure,) = drawn
    figure.canvas.draw()
    assert found.tuning is not None
    (axes,), names = figure.axes, [text for each in figure.legends for text in each.get_texts()]
    labels = [" ".join(group.label.split()) for group in found.tuning.groups]
    assert [text.get_text().replace("\n", " ") for text in names] == labels
    ticks = axes.get_xticklabels() if key == "decay" else []
    assert {text.get_text().replace("\n", "") for text in ticks} == {long.format(place) for place in range(len(ticks))}
    for box in (text.get_window_extent() for text in [*names, *ticks]):
        assert figure.bbox.x0 - 1 <= box.x0 < box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1
    assert axes.bbox.height > figure.bbox.height / 5
    places = sorted((box.x0, box.x1) for box in (text.get_window_extent() for text in ticks))
    assert all(before[1] <= after[0] for before, after in pairwise(places)), "names lie over each other"


def test_the_study_names_the_key_and_none_turns_it_off(tmp_path: Path):
    make(tmp_path, LOSSES)
    record = {"name": "made", "question": "", "points": [], "tune": "optimizer.lr"}
    (tmp_path / "made" / "study.json").write_text(json.dumps(record))
    found = compare(select(["made"], tmp_path))
    assert found.tuning is not None
    assert found.tuning.key == "optimizer.lr"
    assert compare(select(["made"], tmp_path), tuned="none").tuning is None


def test_mistakes(tmp_path: Path):
    make(tmp_path, LOSSES)
    with pytest.raises(UserError, match=r"do not differ in this key\. They differ in lr and betas"):
        compared(tmp_path, tuned="seq_len")
    with pytest.raises(UserError, match="whether less or more of grad_norm is better"):
        compared(tmp_path, metrics=("grad_norm",))
