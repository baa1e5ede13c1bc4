"""YAML as everybody means it: a value is what the same text is on the command line."""

from pathlib import Path
from typing import Any

import pytest

from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.config.study.points import study_points
from titan_exp.config.study.study_file import read_study

TRAPS: list[tuple[str, Any]] = [
    *(("1:30:00", "1:30:00"), ("190:20:30.15", "190:20:30.15"), ("010", "010"), ("-007", "-007"), ("08", "08")),
    *(("0o17", "0o17"), ("0b11", "0b11"), ("0x1F", 31), ("1_000", 1000), ("+3", 3), ("0", 0), ("00", "00")),
    *(("1e3", 1000.0), ("1E-5", 1e-5), (".5", 0.5), ("-.5", -0.5), ("5.", 5.0), ("1.5e3", 1500.0)),
    *(("on", "on"), ("off", "off"), ("Yes", "Yes"), ("NO", "NO"), ("y", "y"), ("true", True), ("False", False)),
    *(("2026-11-29", "2026-11-29"), ("2026-11-29 10:00:00", "2026-11-29 10:00:00"), ("=", "="), ("1.2.3", "1.2.3")),
    *(("~", None), ("null", None), ("", None), (".inf", float("inf")), ("'010'", "010"), ("'true'", "true")),
]


@pytest.mark.parametrize(("text", "value"), TRAPS)
def test_a_value_is_what_it_looks_like(text: str, value: Any, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(f"a: {text}\nb: [{text or '~'}]\n")
    assert read_yaml(path, "a file") == {"a": value, "b": [value]}
    assert type(read_yaml(path, "a file")["a"]) is type(value)


def test_merged_mappings(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(path, "a file")["b"] == {"x": 1, "y": 3}


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, "a: " + "[" * 100_000, "- " * 100_000, "a: " + "[" * 500 + "]" * 500, "a: " + "9" * 5000],
    ids=["laughs", "flow", "block", "deep", "digits"],
)
def test_bounds(text: str, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.yaml"):
        read_yaml(path, "a file")


GROUPS = {
    "cluster/own.yaml": "defaults: [slurm, _self_]\ntime_limit: 1:30:00\ngpus_per_node: 010\naccount: off\n",
    "experiment/own.yaml": "# @package _global_\nexperiment: {tags: [on, 2026-11-29, 0o17], name: no}\n"
    "training: {deterministic: yes, steps: 1e2, max_grad_norm: .5}\n",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for name, text in GROUPS.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def composed(folder: Path, *words: str) -> Experiment:
    return to_experiment(compose([f"hydra.searchpath=[file://{folder}]", *words]))


def test_a_type_says_what_an_option_file_means(own: Path):
    experiment = composed(own, "cluster=own", "+experiment=own")
    assert experiment.cluster.time_limit == "1:30:00"
    assert (experiment.cluster.gpus_per_node, experiment.cluster.account) == (10, "off")
    assert (experiment.experiment.name, experiment.experiment.tags) == ("no", ("on", "2026-11-29", "0o17"))
    training = experiment.training
    assert (training.deterministic, training.steps, training.max_grad_norm) == (True, 100, 0.5)


def test_the_configuration_of_a_run_is_read_back(own: Path):
    experiment = composed(own, "cluster=own", "+experiment=own")
    path = own / "config.yaml"
    path.write_text(to_yaml(experiment))
    assert load_experiment(path, trust=True) == experiment
    path.write_text(path.read_text().replace("'1:30:00'", "1:30:00"))  # edited by hand
    assert load_experiment(path, trust=True) == experiment


def test_config_path_of_an_edited_configuration(own: Path, capsys: pytest.CaptureFixture[str]):
    path = own / "config.yaml"
    path.write_text(to_yaml(composed(own, "cluster=own")).replace("'1:30:00'", "1:30:00"))
    assert main(["train", "--config-path", str(own), "--cfg", "job"]) == 0
    assert "\n  time_limit: '1:30:00'\n" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["no", "On", "YES"])
def test_a_switch_without_a_type_is_refused(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "model" / "own.yaml"
    path.parent.mkdir()
    path.write_text(f"defaults: [llama_debug, _self_]\noptions:\n  flag: {word}\n")
    assert main(["train", "--cfg", "job", "--config-dir", str(tmp_path), "model=own"]) == 2
    said = capsys.readouterr().err
    meant = "false" if word == "no" else "true"
    assert f"{path}, line 3: flag: YAML 1.1 reads {word} as a boolean" in said
    assert f"Write {meant}, or '{word}' in quotes" in said
    for written, value in ((meant, meant), (f"'{word}'", f"'{word}'")):
        path.write_text(f"defaults: [llama_debug, _self_]\noptions:\n  flag: {written}\n")
        assert main(["train", "--cfg", "job", "--config-dir", str(tmp_path), "model=own"]) == 0
        assert f"    flag: {value}\n" in capsys.readouterr().out


def test_a_study_varies_what_is_written(tmp_path: Path):
    path = tmp_path / "study.yaml"
    grid = "{cluster.time_limit: [1:30:00, 90], experiment.tags: [[on], [off]], optimizer.lr: [1e-3]}"
    path.write_text(f"question: Which?\nheld_fixed: [cluster=slurm]\naxes:\n- grid: {grid}\n")
    points = study_points(read_study(path), "")
    assert [point.overrides[2] for point in points[::2]] == ["cluster.time_limit=1:30:00", "cluster.time_limit=90"]
    assert [point.overrides[3] for point in points[:2]] == ["experiment.tags=[on]", "experiment.tags=[off]"]
    assert "lr=1e-3" in points[0].label
    (limit,) = {to_experiment(compose(list(point.overrides))).cluster.time_limit for point in points[:2]}
    assert limit == "1:30:00"
