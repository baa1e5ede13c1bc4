"""Code, environment and Hydra settings that a foreign run folder names are left alone without --trust."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.trainer.test_trainer import SMALL, experiment, run
from titan_exp.checkpoint.background_upload import RemoteRun
from titan_exp.cli.main import main
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import extensions
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.foreign_code import IMPORT_PATH_KEYS, Untrusted, is_own, key_path, signed
from titan_exp.config.schema.typed_config import load_experiment, to_experiment, to_yaml
from titan_exp.launch.run_plan import create_run_folder, plan_run, related_runs
from titan_exp.launch.run_status import run_status
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

CANARY = """\
from pathlib import Path
Path({file!r}).touch()
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.optim.adamw import build
def corpus(config): raise RuntimeError
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "name" / "id"
    path.mkdir(parents=True)
    run(path, "checkpoint.mode=sync")
    (path / "config.yaml").write_text(to_yaml(experiment("checkpoint.mode=sync")))
    return path


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """File that the module `canary_code` touches when it is imported."""
    code, file = tmp_path / "code", tmp_path / "imported"
    package = code / "canary_code"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CANARY.format(file=str(file)))
    (package / "family.py").write_text("from titan_exp.models.llama import Config, block, spec\n")
    monkeypatch.syspath_prepend(str(code))
    yield file
    unimport()


def unimport() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "canary_code"]:
        del sys.modules[name]


def foreign(trained: Path, tmp_path: Path, key: str = "", value: object = None) -> Path:
    """Copy of a run, with another value."""
    path = tmp_path / "foreign"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(trained, path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    group, _, name = key.partition(".")
    if key:
        config[group][name] = value
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def words_of(verb: str, path: Path) -> list[str]:
    if verb in ("plan", "plan search"):
        return [*verb.split(), "--config-path", str(path)]
    if verb == "doctor":
        return ["doctor", "--numerics", str(path), "quantization=float8_rowwise"]
    return {
        "generate": ["generate", str(path), "tokens=2"],
        "generate on ranks": ["generate", str(path), "tokens=2", "tp=2"],
        "evaluate": ["evaluate", str(path)],
        "convert": ["convert", str(path), str(path.parent / "export")],
        "retry": ["retry", str(path)],
        "retry with values": ["retry", str(path), "training.steps=20"],
    }[verb]


@pytest.mark.parametrize(
    "verb",
    [
        *("generate", "evaluate", "convert", "plan", "plan search", "retry", "retry with values"),
        *(["doctor"] if "analysis" in extensions() else []),
    ],
)
def test_code_of_a_foreign_run_is_not_imported(
    verb: str, trained: Path, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
):
    path = foreign(trained, tmp_path, "model.architecture", "canary_code.family")
    RunFolder(path).write_state(RunState("failed", 3, 0.0, 1, None))
    words = words_of(verb, path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert not canary.exists()
    assert f"{path}: you did not launch this run" in said
    assert "model.architecture=canary_code.family: titan_exp would import this code and run it with your rights" in said
    assert said.endswith(f"  titan-exp {' '.join(words)} --trust\n")


@pytest.mark.parametrize("verb", ["generate", pytest.param("evaluate", marks=pytest.mark.night)])
def test_trust_imports_it(verb: str, trained: Path, tmp_path: Path, canary: Path):
    path = foreign(trained, tmp_path, "model.architecture", "canary_code.family")
    assert main([*words_of(verb, path), "--trust"]) == 0
    assert canary.exists()


@pytest.mark.parametrize("key", ["model.architecture", "optimizer.name", "parametrization.name"])
@pytest.mark.parametrize("name", ["canary_code", "canary_that_may_come"])
def test_a_module_without_a_dot_is_code(key: str, name: str, trained: Path, tmp_path: Path, canary: Path):
    """Whether or not it is importable when trust is decided."""
    path = foreign(trained, tmp_path, key, name)
    assert main(["plan", "--config-path", str(path)]) == 2
    with pytest.raises(Untrusted, match=f"{key}={name}: titan_exp would import this code and run it with your rights"):
        load_experiment(path / "config.yaml")
    assert not canary.exists()


@pytest.mark.parametrize("export", ["export", "export.pt"])
def test_exports_of_foreign_code(export: str, trained: Path, tmp_path: Path, canary: Path):
    path, target = foreign(trained, tmp_path, "model.architecture", "canary_code.family"), str(tmp_path / export)
    assert main(["convert", str(path), target, f"format={'torch' if '.' in export else 'dcp'}", "--trust"]) == 0
    canary.unlink()
    unimport()
    assert main(["generate", target, "tokens=1"]) == 2
    assert not canary.exists()


@pytest.mark.parametrize("verb", ["generate", pytest.param("evaluate", marks=pytest.mark.night), "convert"])
def test_code_that_a_verb_does_not_run_needs_no_trust(verb: str, trained: Path, tmp_path: Path, canary: Path):
    path = foreign(trained, tmp_path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    for group, _, name in (key.partition(".") for key in IMPORT_PATH_KEYS[1:]):
        if verb != "evaluate" or group != "data":
            path_of_code = "canary_code.corpus"
            config[group][name] = {"mine": {"name": path_of_code}} if name == "parts" else path_of_code
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(words_of(verb, path)) == 0
    assert not canary.exists()


def test_evaluate_on_other_data_does_not_import_the_source(trained: Path, tmp_path: Path, canary: Path):
    path = foreign(trained, tmp_path, "data.source", "canary_code.corpus")
    assert main(["evaluate", str(path)]) == 2
    assert main(["evaluate", str(path), "data=python_stdlib", "split=all", "data.validation_documents=1"]) == 0
    assert not canary.exists()


@pytest.mark.parametrize("key", IMPORT_PATH_KEYS)
def test_every_key_with_an_import_path_needs_trust(key: str, trained: Path, tmp_path: Path, canary: Path):
    path = foreign(trained, tmp_path, key, "canary_code.corpus")
    with pytest.raises(Untrusted, match=key):
        load_experiment(path / "config.yaml")
    assert not canary.exists()


def test_a_part_of_training_needs_trust(trained: Path, tmp_path: Path, canary: Path):
    path = foreign(trained, tmp_path)
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["training"]["parts"] = {"mine": {"name": "canary_code.corpus", "options": {}}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(Untrusted, match=r"training\.parts\.mine\.name"):
        load_experiment(path / "config.yaml")
    assert not canary.exists()


def test_a_run_is_ones_own_if_one_launched_it(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    typed = ["model=llama_debug", f"paths.runs={tmp_path}", "lr_schedule.decay=canary_code.corpus"]
    plan = plan_run(to_experiment(compose(typed)))
    create_run_folder(plan)
    config = plan.folder.config
    assert load_experiment(config) == plan.experiment
    assert key_path().stat().st_mode & 0o777 == 0o600
    text = config.read_text()
    config.write_text(text.replace("canary_code.corpus", "canary_code.build"))
    with pytest.raises(Untrusted):
        load_experiment(config)
    config.write_text(text)
    assert load_experiment(config) == plan.experiment
    assert load_experiment(config) == load_experiment(config, trust=True)
    key_path().chmod(0o640)
    with pytest.raises(Untrusted):
        load_experiment(config)
    assert load_experiment(config, trust=["canary_code.corpus"]) == plan.experiment


def test_a_home_that_is_read_only_fails_no_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    typed = ["model=llama_debug", f"paths.runs={tmp_path}", "lr_schedule.decay=math.cos"]
    plan = plan_run(to_experiment(compose(typed)))
    create_run_folder(plan)
    assert not plan.folder.signature.exists()
    with pytest.raises(Untrusted):
        load_experiment(plan.folder.config)
    assert create_run_folder(plan), "the names that were typed are trusted"


def test_signatures_of_several_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "config.sig"
    for user in ("one", "two", "one"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / user))
        file.write_text(str(signed("a: 1\n", file)))
    assert len(file.read_text().split()) == 2
    for user, own in (("one", True), ("two", True), ("three", False)):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / user))
        assert is_own(b"a: 1\n", file) is own
        assert not is_own(b"a: 2\n", file)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home, as in a container
    monkeypatch.chdir(tmp_path)
    assert signed("a: 1\n", file) is None
    assert not is_own(b"a: 1\n", file)
    assert not Path("~").exists()


def test_status_and_cancel_import_no_executor(
    trained: Path, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
):
    path = foreign(trained, tmp_path)
    folder = RunFolder(path)
    folder.add_attempt(world_size=1, hosts=(), launched_by="canary_code.LocalExecutor")
    folder.write_state(RunState("running", 3, 0.0, 1, None))
    run_status(folder)
    assert main(["cancel", str(path)]) == 0
    assert main(["status", str(path)]) == 0
    assert not canary.exists()


def test_status_asks_ones_own_executor(tmp_path: Path, canary: Path):
    typed = [*SMALL, f"paths.runs={tmp_path}", "cluster.kind=canary_code.LocalExecutor"]
    plan = plan_run(to_experiment(compose(typed)))
    create_run_folder(plan)
    plan.folder.add_attempt(world_size=1, hosts=(), launched_by="canary_code.LocalExecutor")
    run_status(plan.folder)
    assert canary.exists()


def test_training_imports_no_code_of_related_runs_and_parents(trained: Path, tmp_path: Path, canary: Path):
    parent = foreign(trained, tmp_path, "model.architecture", "canary_code.family")
    shutil.copytree(parent, tmp_path / "x" / "foreign")
    own = experiment(f"paths.runs={tmp_path}", "experiment.name=x", "training.steps=20")
    assert related_runs(own) == []
    typed = [*SMALL, f"paths.runs={tmp_path}", "training.steps=20", f"checkpoint.continue_from={parent}"]
    with pytest.raises(UserError, match="has canary_code"):
        plan_run(to_experiment(compose(typed)))
    assert not canary.exists()


@pytest.mark.parametrize(
    "addition",
    [
        "hydra: {callbacks: {a: {_target_: canary_code.corpus}}}",
        "defaults: [/model: llama_debug]",
        "# @package hydra\ncallbacks: {a: {_target_: canary_code.corpus}}",
        "extra: ${oc.env:HOME}",
    ],
)
def test_composing_a_foreign_run_only_sets_values(
    addition: str, trained: Path, tmp_path: Path, canary: Path, capsys: pytest.CaptureFixture[str]
):
    path = foreign(trained, tmp_path)
    (path / "config.yaml").write_text(addition + "\n" + (path / "config.yaml").read_text())
    assert main(["plan", "--config-path", str(path)]) == 2
    assert not canary.exists()
    said = capsys.readouterr().err
    assert "you did not launch this run" in said
    assert os.environ["HOME"] not in said.replace(str(path), "")


def test_a_foreign_run_without_code_is_planned(trained: Path, tmp_path: Path):
    assert main(["plan", "--config-path", str(foreign(trained, tmp_path))]) == 0


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> str:
    """Value of two variables, of which one is secret by its name."""
    monkeypatch.setenv("PLAIN", "value-of-the-environment")
    monkeypatch.setenv("MY_TOKEN", "value-of-the-environment")
    return "value-of-the-environment"


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("evaluate", "${oc.env:PLAIN}"),
        ("evaluate", "\\${oc.env:PLAIN}"),
        ("evaluate", "${oc.decode:'${oc.env:PLAIN}'}"),
        ("generate", "${oc.env:PLAIN}"),
        ("doctor", "${oc.env:PLAIN}"),
    ],
)
def test_interpolations_of_a_foreign_run_are_text(  # noqa: PLR0917
    verb: str, text: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], environment: str
):
    path = foreign(trained, tmp_path, "data.source", "text")
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["data"] |= {"paths": [f"/nowhere/{text}", "/nowhere/${oc.env:MY_TOKEN}"]}
    config["model"]["name"] = text
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    main(words_of(verb, path))
    captured = capsys.readouterr()
    assert environment not in captured.out + captured.err
    if verb == "evaluate":
        assert f"/nowhere/{text}" in captured.err


def test_downloads_are_foreign_unless_signed(tmp_path: Path, canary: Path):
    typed = ["model=llama_debug", f"paths.runs={tmp_path}", "lr_schedule.decay=canary_code.corpus"]
    plan = plan_run(to_experiment(compose(typed)))
    create_run_folder(plan)
    remote = RemoteRun(f"file://{tmp_path}/remote", "x", "id")
    remote.write_config(plan.folder.config)
    copied = tmp_path / "remote" / "x" / "id" / "config.yaml"
    assert load_experiment(copied) == plan.experiment
    copied.with_name("config.sig").unlink()
    with pytest.raises(Untrusted):
        load_experiment(copied)


def test_cancel_goes_on_after_the_run_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folders = [RunFolder(tmp_path / name) for name in ("theirs", "own")]
    for folder in folders:
        folder.path.mkdir()
        folder.config.touch()
        folder.add_attempt(world_size=1, hosts=())
        folder.write_state(RunState("running", 3, 0.0, 1, None))
    monkeypatch.setattr("os.access", lambda path, _: path != folders[0].path)
    with folders[0].claim("launcher"), folders[1].claim("launcher"):
        assert main(["cancel", *(str(folder.path) for folder in folders)]) == 2
    done = capsys.readouterr()
    assert f"not cancelled, since you may not write to {folders[0].path}" in done.err
    assert "asked to save and stop" in done.out
    assert [folder.stop_requested() for folder in folders] == [False, True]
