"""Damaged files of a user: one error that names the file, at the command line and in a sweep."""

from pathlib import Path

import pytest

from titan_exp.cli.main import main

OPTION = [
    (b"", "has no defaults list, so name, lr, weight_decay and decay_vectors are missing"),
    (b"lr: 1e-5\n", "has no defaults list, so name, weight_decay and decay_vectors are missing"),
    ("\ufefflr: 1e-5\n".encode(), "has no defaults list"),
    (b"lr: [1\n", "line 2, column 1: this is not YAML"),
    (b"defaults: [adamw]\n\tlr: 1\n", "line 2, column 1: this is not YAML: there is a tab"),
    (b"- 1\n", "holds a list instead of an option"),
    (b"text", "holds the single value 'text'"),
    (b"lr: 1\nlr: 2\n", "line 2, column 1: this is not YAML: lr occurs twice"),
    (b"lr: \xff\n", "line 1: this is not UTF-8 text (byte 0xff)"),
    (b"? [1]\n: 2\n", "a list or mapping is used as a key"),
    (b"a: &a [*a]\n", "an alias (*name) lies inside what it names"),
    (b"defaults: adamw\n", "defaults must be a list"),
    (b"defaults: [[1]]\n", "is neither an option nor"),
    (b"defaults: [adamww]\n", "defaults name adamww, and optimizer has no such option (did you mean adamw?)"),
    (b"defaults: [/models: llama_debug]\n", "there is no such group (did you mean model?)"),
    (b"defaults: [broken]\n", "its defaults list leads back to broken.yaml"),
    (b"defaults: [_self_, _self_]\n", "uplicate _self_"),
    (b"# @package training\ndefaults: [adamw]\n", "begins with # @package training, so its keys are not in the group"),
    (b"defaults: [adamw, _self_]\nlr: ${\n", "no viable alternative"),
    (None, "is a folder"),
]
"""Content of optimizer/broken.yaml and what is said about it."""


def write(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


@pytest.mark.parametrize(("content", "says"), OPTION)
def test_an_option_file_is_one_error(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path / "optimizer" / "broken.yaml", content)
    assert main(["train", "--config-dir", str(tmp_path), "optimizer=broken"]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "optimizer" / "broken.yaml") in error
    assert says in error
    assert len(error.splitlines()) == 3, "a headline, the violation and its remedy"
    assert not ("begin the file with" in error and (content or b"").startswith(b"defaults: [")), "it does"


def test_keys_of_an_own_config_are_those_of_no_shipped_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path / "own_package" / "sgd.py", OWN_SGD.encode())
    option, words = tmp_path / "optimizer" / "own.yaml", ["train", "--config-dir", str(tmp_path), "optimizer=own"]
    write(option, b"name: own_package.sgd\nlr: 1e-2\n")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "so weight_decay and decay_vectors are missing\n    give each a value in the file" in error
    option.write_text("name: own_package.sgd\nlr: 1e-2\nweight_decay: 0.0\ndecay_vectors: false\n")
    assert main([*words, "optimizer.momentum=0.5"]) == 2
    assert "add it with a plus: +optimizer.momentum=0.5, or" in capsys.readouterr().err
    assert main([*words, "--cfg", "job", "+optimizer.momentum=0.5"]) == 0


OWN_SGD = """
from dataclasses import dataclass
from titan_exp.config.groups.optimizer import OptimizerConfig

@dataclass(frozen=True)
class Config(OptimizerConfig):
    momentum: float = 0.9

def build(parameters, config):
    raise NotImplementedError
"""


def test_a_sweep_names_the_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "optimizer" / "broken.yaml", b"lr: 1\n")
    words = ["-m", "--dry-run", "--config-dir", str(tmp_path), "optimizer=broken", "training.steps=1,2"]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("broken.yaml has no defaults list") == 1
    assert len(error.splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"training: {steps: 5}\n", "does not begin with # @package _global_"),
        (b"# @package _global_\ndefaults: [override /optimizer: nope]\n", "defaults name nope"),
        (b"# @package _global_\ntraining: [\n", "not YAML"),
    ],
)
def test_an_overlay_is_one_error(content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "experiment" / "broken.yaml", content)
    assert main(["train", "--config-dir", str(tmp_path), "+experiment=broken"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"training: [1", "not YAML"), (b"- 1\n", "holds a list"), (b"a: 1\n", "lacks experiment"), (b"\xff", "UTF-8")],
)
def test_a_primary_file_is_one_error(content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write(tmp_path / "config.yaml", content)
    assert main(["train", "--config-path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'config.yaml'}" in error
    assert says in error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty. A study has"),
        (b"[1", "not YAML"),
        (b"question: x\n\taxes: 1\n", "line 2, column 1: this is not YAML: there is a tab"),
        (b"- 1\n", "holds a list instead of a study"),
        (b"question: x\nquestion: y\n", "line 2, column 1: this is not YAML: question occurs twice"),
        (b"\xff", "line 1: this is not UTF-8 text"),
        (b"{[1]: 2}", "a list or mapping is used as a key"),
        (b"question: x\nseeds: 99999999999\n", "must be a number of seeds up to 10000"),
        (None, "this is a folder"),
    ],
)
def test_a_study_file_is_one_error(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path / "mine.yaml", content)
    assert main(["sweep", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(str(tmp_path / "mine.yaml"))
    assert says in error
