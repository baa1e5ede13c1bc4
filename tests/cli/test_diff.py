"""What differs between two runs, and that nothing does."""

import json
from pathlib import Path

import pytest

from tests.cli.test_show import make
from titan_exp.cli.main import main
from titan_exp.tracking.run_folder.run_folder import RunFolder


def diff(a: RunFolder | str, b: RunFolder | str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["diff", *(run if isinstance(run, str) else str(run.path) for run in (a, b)), *words]) == 0
    return capsys.readouterr().out


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunFolder, RunFolder]:
    """Two runs that differ in one key, of the same code, machine and data."""
    monkeypatch.chdir(tmp_path)
    runs = make(state="done"), make("training.steps=20", "experiment.notes='to be sure'", state="done")
    for folder in runs:
        folder.update_attempt(1, data={"data.paths": "3 files", "data.content": "abc"})
    return runs


def test_a_run_does_not_differ_from_itself(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    text = diff(two[0].path.name[:6], two[0], capsys)
    assert text.endswith("\nnothing differs\n\nthe same: configuration, code, environment, data\n")


def test_values_stand_side_by_side(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    text = diff(*two, capsys)
    assert text.startswith(f"a: x/{two[0].path.name}\nb: x/{two[1].path.name}\n")
    lines = text.partition("\nconfiguration\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in lines[:2]] == [["a", "b"], ["experiment.notes", "to", "be", "sure", *NO_EFFECT]]
    steps = next(line for line in lines if "training.steps" in line)
    assert steps.split() == ["training.steps", "10", "20"]
    assert steps.index("10") == lines[0].index("a")
    assert steps.index("20") == lines[0].index("b")
    assert "\nthe same: code, environment, data\n" in text
    found = json.loads(diff(*two, capsys, "--json"))
    assert {"key": "training.steps", "a": "10", "b": "20", "has_effect": True} in found["configuration"]
    assert (found["code"], found["environment"], found["data"], found["unknown"]) == ([], [], [], [])


NO_EFFECT = ["(does", "not", "change", "results)"]


def test_code_versions_and_data(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    first, second = two
    part = {"name": "mine", "path": "/mine", "version": None, "commit": "1" * 40, "dirty": False, "diff": "0"}
    edit(first.code, imported=[{**part, "files": {"a.py": "1", "b.py": "1"}}])
    edit(second.code, imported=[{**part, "commit": "2" * 40, "files": {"a.py": "2", "b.py": "1"}}])
    environment = json.loads(second.env.read_text())
    packages = {**environment["packages"], "torch": "0.0.1", "extra": "7"}
    variables = {**environment["environment"], "SLURM_JOB_ID": "9", "NCCL_ALGO": "Ring"}
    edit(second.env, packages=packages, host="elsewhere", environment=variables)
    second.update_attempt(1, data={"data.paths": "3 files", "data.content": "xyz"})
    text = diff(first, second, capsys)
    assert "mine: from commit 1111111111 to commit 2222222222; 1 file differs: a.py" in text
    section = text.partition("\nenvironment\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in section.splitlines()[1:]] == ["torch", "extra", "$NCCL_ALGO"]
    assert [line.split() for line in section.splitlines()][2] == ["extra", "not", "there", "7"]
    assert ["data.content", "abc", "xyz"] in [line.split() for line in text.splitlines()]
    assert "the same:" not in text


def test_older_records_differ_by_their_patch(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    for folder, patch in zip(two, ("+one\n", "+two\n"), strict=True):
        record = {"run_id": folder.path.name, "version": "0.1.0", "commit": "c" * 40, "dirty": True}
        folder.code.write_text(json.dumps(record))
        folder.diff.write_text(patch)
    assert "titan_exp: commit cccccccccc with uncommitted changes" in diff(*two, capsys)
    two[1].diff.write_text("+one\n")
    assert "the same: code" in diff(*two, capsys)


def test_what_is_not_recorded_is_said(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    two[0].env.unlink()
    two[0].update_attempt(1, data=None)
    text = diff(*two, capsys)
    name = f"x/{two[0].path.name}"
    assert text.endswith(f"the same: code\nenvironment of {name} is not recorded\ndata of {name} is not recorded\n")


def test_mistakes_are_explained(two: tuple[RunFolder, RunFolder], capsys: pytest.CaptureFixture[str]):
    for words, says in {
        (): "Name two runs: titan-exp diff A B",
        ("x",): "Name two runs",
        ("x", str(two[0].path)): "this matches 2 runs",
        (str(two[0].path), "nope"): "unknown run or study",
    }.items():
        assert main(["diff", *words]) == 2
        assert says in capsys.readouterr().err
