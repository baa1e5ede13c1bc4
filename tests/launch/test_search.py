"""Searches and halving of study files: drawn points, typed overrides, mistakes, Optuna's batches."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.points import Point, narrowed, study_points
from titan_exp.config.study.study import Choice, Range, Search, Study
from titan_exp.config.study.study_file import read_study
from titan_exp.launch.sweep.rounds import drawn_choices, next_batch

LR = {"optimizer.lr": Range(log_uniform=(1e-4, 1e-1))}
RANGES = LR | {
    "optimizer.weight_decay": Range(uniform=(0.0, 0.2)),
    "model.layers": Range(integer=(2, 4)),
    "lr_schedule.decay": Range(choice=("linear", "sqrt")),
}
SEARCH = """\
search:
  method: {method}
  points: {points}
  ranges:
    optimizer.lr: {{log_uniform: [1e-4, 1e-1]}}
    model.layers: {{integer: [2, 4]}}
"""


def study(folder: Path, text: str) -> Study:
    (folder / "mine.yaml").write_text(f"question: Why?\n{text}")
    return read_study(folder / "mine.yaml")


def points_of(read: Study, fixed: Sequence[str] = ()) -> list[Point]:
    assert read.search is not None
    return study_points(read, "", fixed, drawn_choices(read.search))


def values(search: Search, key: str) -> list[str]:
    texts = [text for choice in drawn_choices(search) for text in choice.overrides]
    return [text.partition("=")[2] for text in texts if text.startswith(f"{key}=")]


@pytest.mark.parametrize("method", ["random", "sobol"])
def test_points_lie_in_their_ranges_and_more_points_keep_the_first(method):
    search = Search(method, 40, RANGES)
    points = drawn_choices(search)
    assert len(set(points)) == 40
    assert drawn_choices(Search(method, 13, RANGES)) == points[:13]
    assert drawn_choices(Search(method, 13, RANGES, seed=1)) != points[:13]
    rates = list(map(float, values(search, "optimizer.lr")))
    assert 1e-4 <= min(rates) < 3e-4
    assert 3e-2 < max(rates) <= 1e-1
    below = sum(rate < math.sqrt(1e-4 * 1e-1) for rate in rates)
    assert 12 <= below <= 28, "half of the points below the geometric mean"
    assert set(values(search, "model.layers")) == {"2", "3", "4"}
    assert set(values(search, "lr_schedule.decay")) == {"linear", "sqrt"}
    assert all(0 <= float(decay) <= 0.2 for decay in values(search, "optimizer.weight_decay"))


@pytest.mark.parametrize("seed", range(5))
def test_sobol_has_a_point_in_every_eighth_of_a_range(seed):
    rates = values(Search("sobol", 8, dict([*RANGES.items()][:2]), seed), "optimizer.lr")
    places = sorted(math.log10(float(rate) / 1e-4) / 3 * 8 for rate in rates)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert gaps == pytest.approx([1.0] * 7, abs=0.01)


def test_a_search_of_few_values_has_each_once_and_no_more():
    layers = {"model.layers": Range(integer=(2, 4))}
    assert sorted(values(Search("random", 3, layers), "model.layers")) == ["2", "3", "4"]
    with pytest.raises(UserError, match="only 3 different points"):
        drawn_choices(Search("sobol", 4, layers))


def test_bounds_with_many_digits_are_kept():
    narrow = Range(uniform=(0.123456, 0.123457))
    assert [narrow.value(u) for u in (0.0, 0.9999)] == ["0.123457", "0.123457"]
    assert Range(log_uniform=(1e-6, 1e-2)).value(0.0) == "1e-06"


def test_points_of_a_study_have_seeds_and_short_labels(tmp_path: Path):
    read = study(tmp_path, SEARCH.format(method="sobol", points=3) + "seeds: 2\n")
    points = points_of(read)
    assert [point.seed for point in points] == [0, 1] * 3
    assert points[0].label.startswith("lr=")
    assert points[0].label.endswith("seed=0")
    assert points[0].overrides[0] == "experiment.name=mine"


def test_typed_overrides_fix_a_range(tmp_path: Path):
    read = study(tmp_path, SEARCH.format(method="sobol", points=3))
    parse = OverridesParser.create().parse_overrides
    varied, fixed = narrowed(read, parse(["model.layers=3", "experiment.seed=1,2", "training.steps=7"]))
    assert fixed == ("model.layers=3", "training.steps=7")
    points = points_of(varied, fixed)
    assert len(points) == 6
    assert all("layers" not in point.label and "model.layers=3" in point.overrides for point in points)
    for typed, said in (
        (["model.layers=2,3"], "a search draws the values of its keys itself"),
        (["training.steps=7,8"], "a search draws the values of its keys itself"),
        (["model.layers=3", "optimizer.lr=1e-3"], "leaves the search no range"),
    ):
        with pytest.raises(UserError, match=said):
            narrowed(read, parse(typed))


def test_rungs_are_steps_or_fractions(tmp_path: Path):
    search = SEARCH.format(method="random", points=9)
    steps, shares = (
        study(tmp_path, f"{search}halving: {{metric: loss, rungs: {rungs}, keep: 1/3}}\n").halving
        for rungs in ("[100, 300, 900]", "[1/9, 1/3, 1]")
    )
    assert steps is not None
    assert shares is not None
    assert steps.steps(900) == shares.steps(900) == [100, 300, 900]
    assert [steps.stop_after(rung) for rung in range(3)] == ["100", "300", None]
    assert steps.keep == Fraction(1, 3)
    assert [steps.kept(count) for count in (1, 2, 8, 9)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "axes: [{grid: {a.b: [1]}}]\nsearch: {method: sobol, points: 2, ranges: {a.b: {integer: [1, 9]}}}",
            "either axes",
        ),
        ("search: {method: sobl, points: 2, ranges: {a.b: {integer: [1, 9]}}}", "did you mean sobol"),
        ("search: {method: sobol, ranges: {a.b: {integer: [1, 9]}}}", "search.points: this key has no value"),
        ("search: {method: sobol, points: 2}", "search.ranges: this key has no value"),
        ("search: {method: sobol, points: 2, ranges: {a.b: {log_uniform: [0, 1]}}}", "no value at 0 or below"),
        ("search: {method: sobol, points: 2, ranges: {a.b: {uniform: [2, 1]}}}", "a lower and then a higher number"),
        ("search: {method: sobol, points: 2, ranges: {a.b: {integer: [1, 2.5]}}}", "must be a whole number"),
        ("search: {method: sobol, points: 2, ranges: {a.b: {loguniform: [1, 2]}}}", "did you mean log_uniform"),
        ("search: {method: sobol, points: 2, batch: 2, ranges: {a.b: {integer: [1, 9]}}}", "draws all points at once"),
        (
            "search: {method: sobol, points: 2, ranges: {a.b: {integer: [1, 9]}}}\nbaseline: x",
            "no baseline exists before",
        ),
        (
            "search: {method: optuna, points: 2, ranges: {a.b: {integer: [1, 9]}}}\n"
            "halving: {metric: loss, rungs: [1, 2]}",
            "results of whole runs",
        ),
        ("axes: [{grid: {a.b: [1]}}]\nhalving: {metric: loss, rungs: [300, 100]}", "each rung must be larger"),
        ("axes: [{grid: {a.b: [1]}}]\nhalving: {metric: loss, rungs: [100]}", "at least two steps"),
        ("axes: [{grid: {a.b: [1]}}]\nhalving: {metric: loss, rungs: [1/3, 2]}", "of which the last is 1"),
        ("axes: [{grid: {a.b: [1]}}]\nhalving: {metric: loss, rungs: [1, 2], keep: 3}", "between 0 and 1"),
        ("axes: [{grid: {a.b: [1]}}]\nhalving: {metric: mfu, rungs: [1, 2]}", "does not know whether less or more"),
        ("axes: [{grid: {optimizer.lr: [1]}}]\ntune: optimizer.l", "did you mean optimizer.lr"),
    ],
)
def test_mistakes_are_explained(text: str, said: str, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        study(tmp_path, text)
    assert said in str(caught.value)


def test_optuna_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'titan_exp\[optuna\]'"):
        next_batch(Search("optuna", 4, RANGES, batch=2, metric="loss"), "min", ())


def test_optuna_proposes_from_results_and_alike_each_time():
    pytest.importorskip("optuna")
    search = Search("optuna", 60, LR, batch=20, metric="loss")

    def result(choice: Choice) -> float:
        rate = float(choice.overrides[0].partition("=")[2])
        return math.inf if rate > 3e-2 else abs(math.log10(rate / 3e-3))

    def batches(sign: float) -> list[tuple[Choice, ...]]:
        found = []
        for _ in range(3):
            found.append(
                next_batch(search, "min", [(choice, sign * result(choice)) for batch in found for choice in batch])
            )
        return found

    first, second, third = found = batches(1.0)
    assert batches(1.0) == found
    assert len({*first, *second, *third}) == 60
    assert batches(-1.0)[1] != second, "it learns from the results"
    near = [sum(result(choice) < 0.3 for choice in batch) for batch in found]
    assert near[2] >= 2 * near[0], "it goes to the best rate"
    assert next_batch(search, "min", [(choice, 0.0) for batch in found for choice in batch]) == ()
