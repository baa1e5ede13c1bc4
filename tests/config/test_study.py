"""Study files: their grammar, their errors and their points."""

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.labels import names_all, words_of
from titan_exp.config.study.points import FilePoints, Point, baseline_of, folder_name, narrowed, study_points
from titan_exp.config.study.study import Study
from titan_exp.config.study.study_file import find_study, read_study, study_files
from titan_exp.launch.memory_gate import hours

HEAD = "question: Why?\n"


@pytest.fixture
def study(tmp_path: Path):
    """Read a study from text."""

    def read(text: str) -> Study:
        (tmp_path / "mine.yaml").write_text(text if text.startswith("question") else HEAD + text)
        return read_study(tmp_path / "mine.yaml")

    return read


def labels(points: list[Point]) -> list[str]:
    return [point.label for point in points if point.excluded is None]


def test_a_grid_is_every_combination(study):
    read = study("axes:\n  - grid: {optimizer.lr: [1e-3, 0.002], model.dim: [64, 128]}\n")
    assert labels(study_points(read, "")) == [
        "lr=1e-3 dim=64",
        "lr=1e-3 dim=128",
        "lr=0.002 dim=64",
        "lr=0.002 dim=128",
    ]
    first = study_points(read, "")[0]
    assert first.overrides == ("experiment.name=mine", "optimizer.lr=1e-3", "model.dim=64")


def test_zip_pairs_values_and_list_names_points(study):
    read = study(
        "axes:\n  - zip: {model.dim: [64, 96], model.heads: [4, 6]}\n"
        "  - list: {plain: [], betas: ['optimizer.betas=[0.9,0.99]', optimizer.eps=1e-5]}\n"
    )
    points = study_points(read, "")
    assert labels(points) == [
        "dim=64 heads=4 plain",
        "dim=64 heads=4 betas",
        "dim=96 heads=6 plain",
        "dim=96 heads=6 betas",
    ]
    assert points[1].overrides[1:] == (
        "model.dim=64",
        "model.heads=4",
        "optimizer.betas=[0.9,0.99]",
        "optimizer.eps=1e-5",
    )


def test_axis_applies_where_its_conditions_hold(study):
    read = study(
        "held_fixed: [compile=none]\naxes:\n"
        "  - {name: how, list: {off: [], every: [activation_checkpoint=every_n]}}\n"
        "  - {grid: {activation_checkpoint.every: [2, 4]}, when: {how: every}}\n"
        "  - {grid: {training.steps: [5]}, unless: {activation_checkpoint.every: 4.0}}\n"
        "  - {grid: {training.seq_len: [64]}, when: {compile: blocks}}\n"
    )
    assert labels(study_points(read, "")) == ["how=off steps=5", "how=every every=2 steps=5", "how=every every=4"]


def test_values_become_overrides_that_hydra_reads(study):
    read = study(
        "axes:\n  - grid: {data.paths: [[a, b c], []], checkpoint.every: [null, 5], compile.enabled: [true], "
        "experiment.notes: ['it''s, so', plain]}\n"
    )
    parser = OverridesParser.create()
    values = [[parser.parse_override(text).value() for text in point.overrides[1:]] for point in study_points(read, "")]
    assert values[0] == [["a", "b c"], None, True, "it's, so"]
    assert values[-1] == [[], 5, True, "plain"]


@pytest.mark.parametrize("name", ["null", "True", "10", "1e3", "2026_01", "nan", "qk-norm", "v1.5"])
def test_the_name_of_a_file_stays_text(name: str, tmp_path: Path):
    (tmp_path / f"{name}.yaml").write_text(HEAD + "axes:\n  - grid: {a.b: [1]}\n")
    (point,) = study_points(read_study(tmp_path / f"{name}.yaml"), "")
    assert OverridesParser.create().parse_override(point.overrides[0]).value() == name


def test_seeds_repeat_every_point(study):
    read = study("axes:\n  - grid: {optimizer.lr: [1, 2]}\nseeds: 2\n")
    points = study_points(read, "")
    assert labels(points) == ["lr=1 seed=0", "lr=1 seed=1", "lr=2 seed=0", "lr=2 seed=1"]
    assert [(point.variant, point.seed) for point in points[:2]] == [("lr=1", 0), ("lr=1", 1)]
    assert points[1].overrides[-1] == "experiment.seed=1"
    assert study("axes:\n  - grid: {a: [1]}\nseeds: [7, 9]\n").seeds == (7, 9)


def test_excluded_points_have_a_reason(study):
    read = study(
        "axes:\n  - grid: {a.b: [1, 2], c.d: [1, 2]}\n"
        "exclude:\n  - {a.b: 2, c.d: 2, reason: too large}\n  - {a.b: 1, c.d: [1, 3e0]}\n".replace("3e0", "2")
    )
    points = study_points(read, "")
    assert [point.excluded for point in points] == [
        *["the study excludes it: a.b=1 c.d=1,2"] * 2,
        None,
        "the study excludes it: too large",
    ]


def test_sizes_have_folders_of_their_own(study):
    read = study("axes:\n  - grid: {a: [1]}\nsizes: {small: [b=1], large: [b=2, a.x=3]}\n")
    assert (folder_name(read, "small"), folder_name(read, "large")) == ("mine", "mine_large")
    assert study_points(read, "large")[0].overrides == ("experiment.name=mine_large", "b=2", "a.x=3", "a=1")


def test_typed_overrides_narrow_add_and_win(study):
    read = study("held_fixed: [model=llama_debug]\naxes:\n  - grid: {optimizer.lr: [1, 2]}\nseeds: 2\n")
    typed = OverridesParser.create().parse_overrides(
        ["optimizer.lr=3,4", "training.steps=5,6", "model=x", "experiment.seed=9"]
    )
    varied, fixed = narrowed(read, typed)
    points = study_points(varied, "", fixed)
    assert labels(points) == [f"lr={lr} steps={steps} seed=9" for lr in (3, 4) for steps in (5, 6)]
    assert points[0].overrides == (
        *("experiment.name=mine", "optimizer.lr=3", "training.steps=5", "experiment.seed=9", "model=x"),
    )
    zipped = study("axes:\n  - zip: {a.b: [1, 2], c.d: [3, 4]}\n")
    with pytest.raises(UserError, match=r"varies several keys together \(a\.b"):
        narrowed(zipped, OverridesParser.create().parse_overrides(["a.b=1"]))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["optimizer.lr=0.004,5e-1"], ["lr=4e-3 betas=[0.9,0.95]", "lr=4e-3 betas=[0.9,0.99]", *["lr=0.5 betas="] * 2]),
        (["optimizer.lr=0.0040", "optimizer.betas=[0.90, 0.990]"], ["lr=4e-3 betas=[0.9,0.99]"]),
    ],
)
def test_labels_of_a_narrowed_study_keep_the_spelling_of_its_file(study, typed: list[str], expected: list[str]):
    read = study("axes:\n  - grid: {optimizer.lr: [4e-3, 0.02], optimizer.betas: [[0.9, 0.95], [0.9, 0.99]]}\n")
    varied, fixed = narrowed(read, OverridesParser.create().parse_overrides(typed))
    found = labels(study_points(varied, "", fixed))
    assert [label[: len(begin)] for label, begin in zip(found, expected, strict=True)] == expected


def test_words_of_a_label_are_found_in_any_spelling():
    label = words_of("optimizer=adamw lr=4e-3 betas=[0.9,0.95] enabled=true clip=null plain seed=0")
    for wanted in (
        *("lr=0.004", "optimizer.lr=0.0040,seed=0", "seed=0 lr=4e-03", "betas=[0.90, 0.95]"),
        *("betas=[.9,9.5e-1],seed=0", "enabled=True", "clip=NULL", "plain", "optimizer='adamw'"),
    ):
        assert names_all(wanted, label), wanted
    for wanted in ("lr=0.005", "r=4e-3", "betas=[0.95,0.9]", "seed=00.1", "optimizer=adam", "plai", "lr", "", ","):
        assert not names_all(wanted, label), wanted


def test_the_file_has_a_point_whatever_the_command_line_adds(study):
    text = "held_fixed: [model=a]\naxes:\n  - grid: {optimizer.lr: [1e-3, 2e-3]}\nseeds: 2\n"
    file = FilePoints(study_points(study(text), ""))
    of_file = ("experiment.name=other", "model=a", "optimizer.lr=0.001", "experiment.seed=0")
    assert file.has(of_file)
    assert file.has((*of_file, "cluster=slurm", "training.steps=5"))
    steep = tuple(word.replace("0.001", "0.5") for word in of_file)
    assert (file.has(steep), file.has(steep, {"optimizer.lr"})) == (False, True)
    other = tuple(word.replace("model=a", "model=b") for word in of_file)
    assert (file.has(other), file.has(other, {"optimizer.lr"}), file.has(other, {"model"})) == (False, False, True)
    excluding = text + "exclude: [{optimizer.lr: 1e-3}]\n"
    assert not FilePoints(study_points(study(excluding), "")).has(of_file)


def test_objects_of_one_key_are_merged_in_their_order(study):
    read = study(
        "question: q\nheld_fixed: ['+data.options={a: 1}', training.steps=1, 'data.options={b: 1}']\n"
        "axes:\n- list: {x: ['data.options={b: 2}'], y: [training.seq_len=8]}\n- grid: {data.options: [{d: 4}]}\n"
    )
    typed = ("+data.options={c: 4}", "training.steps=2")
    x, y = (point.overrides[1:] for point in study_points(read, "", typed))
    first, last = ("+data.options={a: 1}", "data.options={b: 1}"), ("data.options={d:4}", "+data.options={c: 4}")
    assert x == (*first, "data.options={b: 2}", *last, "training.steps=2")
    assert y == (*first, "training.seq_len=8", *last, "training.steps=2")


@pytest.mark.parametrize(
    "typed", [("optimizer.lr=1,2", "optimizer.lr=3,4"), ("training.steps=5,6", "training.steps=7")]
)
def test_a_typed_key_is_swept_once(study, typed: tuple[str, ...]):
    read = study("question: q\naxes:\n- grid: {optimizer.lr: [1, 2]}\n")
    with pytest.raises(UserError, match="already sweeps this key"):
        narrowed(read, OverridesParser.create().parse_overrides(list(typed)))


def test_two_axes_of_a_point_set_different_keys(study):
    lr = "- grid: {optimizer.lr: [1e-3, 2e-3]"
    read = study(f"question: q\naxes:\n{lr}}}\n{lr}, model: [a]}}\n")
    with pytest.raises(UserError, match=r"two axes set optimizer\.lr in one point: optimizer\.lr=1e-3 and"):
        study_points(read, "")
    read = study(
        f"question: q\naxes:\n- grid: {{model: [a, b]}}\n{lr}}}\n  when: {{model: a}}\n{lr}}}\n  unless: {{model: a}}\n"
    )
    assert len(study_points(read, "")) == 4


def test_the_name_of_a_list_chooses_among_its_points(study):
    read = study("axes:\n  - {name: how, list: {x: [a=1], y: [a=2, b=3], z: []}}\n  - grid: {optimizer.lr: [1, 2]}\n")

    def points(*typed: str) -> list[str]:
        varied, fixed = narrowed(read, OverridesParser.create().parse_overrides(list(typed)))
        return labels(study_points(varied, "", fixed))

    assert points("how=y", "optimizer.lr=1") == ["how=y lr=1"]
    assert points("how=z,x", "optimizer.lr=1") == ["how=z lr=1", "how=x lr=1"]
    with pytest.raises(UserError, match=r"how=w: this axis has no such choice \(it has x, y and z\)"):
        points("how=w")


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("{a.b: 2.0, how: x}", "b=2 how=x"), ("b=1 how=y", "b=1 how=y")],
)
def test_the_baseline_is_one_of_the_points(study, baseline: str, expected: str):
    axes = "axes:\n  - grid: {a.b: [1, 2]}\n  - {name: how, list: {x: [], y: [c=1]}}\n"
    read = study(f"{axes}baseline: {baseline}\nseeds: 2\n")
    assert baseline_of(read, study_points(read, "")) == expected


@pytest.mark.parametrize(
    ("baseline", "says"),
    [("{a.b: 2}", "fits 2 points"), ("b=3 how=x", "no point of the study fits the baseline"), ("x", "fits 2 points")],
)
def test_a_baseline_that_is_no_point_is_refused(study, baseline: str, says: str):
    axes = "axes:\n  - grid: {a.b: [1, 2]}\n  - {name: how, list: {x: [], y: [c=1]}}\n"
    read = study(f"{axes}baseline: {baseline}\n")
    with pytest.raises(UserError, match=says) as caught:
        baseline_of(read, study_points(read, ""))
    if says.startswith("fits"):
        remedy = re.search(r"write (baseline: .*)\.$", str(caught.value))
        assert remedy is not None
        read = study(f"{axes}{remedy[1]}\n")
        assert baseline_of(read, study_points(read, "")) in ("b=2 how=x", "b=1 how=x")


def test_a_baseline_of_a_tuned_study_is_one_point_of_its_group(study):
    axes = "axes:\n  - list: {plain: [], new: [c=1]}\n  - grid: {optimizer.lr: [1e-3, 3e-3]}\ntune: optimizer.lr\n"
    read = study(f"{axes}baseline: plain\n")
    with pytest.raises(UserError, match=r"As the study tunes optimizer\.lr, its whole group is the baseline") as caught:
        baseline_of(read, study_points(read, ""))
    remedy = re.search(r"write (baseline: .*?)\. As", str(caught.value))
    assert remedy is not None
    read = study(f"{axes}{remedy[1]}\n")
    assert baseline_of(read, study_points(read, "")) == "plain lr=1e-3"


GRID = "axes:\n  - grid: {optimizer.lr: [1, 2]}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qestion: x\n" + GRID, "did you mean question?"),
        (GRID.replace("axes", "axis"), "did you mean axes?"),
        ("seeds: 2\n", "a study needs axes or a search"),
        ("axes:\n  - gird: {a: [1]}\n", "did you mean grid?"),
        ("axes:\n  - {grid: {a: [1]}, zip: {b: [1]}}\n", "an axis has exactly one of grid, zip or list"),
        ("axes:\n  - {grid: {a: [1]}, whn: {b: 1}}\n", "did you mean when?"),
        ("axes:\n  - grid: {optimizer.lr: 1e-3}\n", "write [1e-3]"),
        ("axes:\n  - zip: {a: [1, 2], b: [1]}\n", "a has 2 and b has 1"),
        ("axes:\n  - list: {one: model=x}\n", "must be a list"),
        ("axes:\n  - list: {one: [model]}\n", "write model=..."),
        ("held_fixed: [{model: x}]\n" + GRID, "write model=x"),
        ("held_fixed: {model: x}\n" + GRID, "must be a list"),
        (GRID + "  - {grid: {a: [1]}, when: {optimizer.lrr: 1}}\n", "did you mean optimizer.lr?"),
        (GRID + "  - {grid: {a: [1]}, when: {optimizer.lr: 3}}\n", "this axis has no such value"),
        ("axes:\n  - {grid: {a: [1]}, when: {b: 1}}\n  - grid: {b: [1]}\n", "no axis above this one varies this key"),
        (GRID + "exclude: [{optimizer.l: 1}]\n", "no axis above this one"),
        (GRID + "exclude: {optimizer.lr: 1}\n", "must be a list"),
        (GRID + "seeds: many\n", "must be a number of seeds"),
        (GRID + "seeds: [-1]\n", "must be a number of seeds"),
        (GRID + "baseline: {optimizer.lr: 3}\n", "this axis has no such value"),
        (GRID + "metrics: {los: min}\n", "did you mean loss?"),
        (GRID + "metrics: {loss: down}\n", "choose min or max"),
        (GRID + "sizes: [a]\n", "keys with values"),
        (GRID + GRID, "axes occurs twice"),
        ("[]", "not YAML|holds a list where a study is expected"),
    ],
)
def test_every_mistake_is_reported(study, text: str, says: str):
    with pytest.raises(UserError) as caught:
        study(text)
    assert any(part in str(caught.value) for part in says.split("|")), str(caught.value)


def test_all_mistakes_are_reported_at_once(study):
    with pytest.raises(UserError) as caught:
        study("seeds: many\nmetrics: {los: min}\naxes: 3\n")
    assert len(caught.value.violations) == 3


def test_a_question_is_required(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(GRID)
    with pytest.raises(UserError, match="question: this key has no value"):
        read_study(tmp_path / "mine.yaml")


def test_study_of_the_guide_is_valid(study):
    readme = (Path(__file__).parents[2] / "docs/guides/sweeps-and-slurm.md").read_text()
    text = readme[readme.index("question: Does a warm-up") :]
    read = study(text[: text.index("```")])
    points = study_points(read, "laptop")
    assert len(labels(points)) == 3 * (2 + 3)
    assert baseline_of(read, points) == "lr=1e-3 warmup_steps=20 decay_steps=180"


def test_user_studies_hide_shipped_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shipped = find_study("optimizers")
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "optimizers.yaml").write_text(HEAD + GRID)
    (tmp_path / "sweeps" / "mine.yaml").write_text(HEAD + GRID)
    assert find_study("optimizers") != shipped
    assert find_study("sweeps/mine.yaml") == find_study("mine") == Path("sweeps/mine.yaml")
    assert {"mine", "pipeline_schedules"} <= set(study_files())
    with pytest.raises(UserError, match=r"Did you mean optimizers\?"):
        find_study("optimisers")
    with pytest.raises(UserError, match="no such file"):
        find_study("sweeps/nope.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 1.5), ("30:00", 0.5), ("2:30:00", 2.5), ("1-0", 24), ("1-12:30", 36.5), ("2-0:0:36", 48.01)],
)
def test_time_limits_in_hours(text: str, expected: float):
    assert hours(text) == pytest.approx(expected)
