"""Mistakes of a hasty user: each message has the line to type, and the line that it names is valid."""

import re
import shlex
from pathlib import Path

import pytest

from titan_exp.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Message of a command that is refused."""
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err + out
    return err


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("model=[llama_debug,llama9]", "model=llama9: this group has no such option"),
        ("optimizer=[[adamw]]", "did you mean adamw?"),
        ("optimizer={adamw:1}", "optimizer.adamw: unknown key"),
        ("hydra.verbose={a:1}", "hydra.verbose={a:1}: Hydra cannot use this value"),
        ("hydra.verbose=null", "titan-exp train --cfg hydra"),
        ("hydra.job.env_copy=[NOT_SET_ANYWHERE]", "hydra.job.env_copy"),
        ("hydra.run.dir='${nope}'", "hydra.run.dir=${nope}: interpolation key 'nope' not found"),
        ("hydra.nope=1", "key 'nope' does not exist"),
        ("hydra/launcher=nope", "hydra/launcher=nope: "),
        (f"training.{'x' * 300}=1", "unknown key"),
        (f"model={'x' * 300}", "choose"),
        (f"paths.runs=/{'x' * 300}", "short"),
        ("++model=llama_debug", "leave them out: model=llama_debug"),
        ("~model=qwen3_debug", "the option of this group is llama_laptop"),
        ("model/family=llama3", "each option of model chooses it for you"),
        ("llama3_8b", "type model=llama3_8b"),
        ("mine.yaml", "--config-path mine.yaml"),
        ("optimizer.lr", "for example optimizer.lr=..."),
        ("training.steps: 100", "type training.steps=100"),
        ("training.steps=100 ,", "leave it out"),
        ("'training.steps=100;'", "write training.steps=100"),
        ("training.steps=4k", "write training.steps=4000 (or 4096)"),
        ("training.steps='300 steps'", "write training.steps=300"),
        ("training.steps='3 hours'", "it means: Number of optimizer steps"),
        ("training.steps=x", "for example training.steps=1000 (it means"),
        ("optimizer.betas=x", "for example optimizer.betas='[0.9,0.99]'"),
        ("optimizer.lr=0", "for example optimizer.lr=1e-3"),
        ("training.steps='${rest_of:1}'", "rest_of takes two numbers, not 1"),
        ("experiment.notes=does it work", "experiment.notes='\"does it work\"'"),
        ("experiment.notes='${'", "experiment.notes='\"\\${\"'"),
        ("data.paths=[notes, books]", "write data.paths='[notes,books]'"),
        ("data.paths=notes,books", "write data.paths='[notes,books]'"),
        ("optimizer.betas='(0.9, 0.95)'", "write optimizer.betas='[0.9,0.95]'"),
        ("optimizer.lr='{1e-3,1e-4}'", "titan-exp train -m optimizer.lr=1e-3,1e-4"),
        ("-m optimizer.lr=1e-3 1e-4", "optimizer.lr='1e-3,1e-4'"),
        ("data=./notes", "data=text data.paths='[./notes]'"),
        ("model.hidden_size=512", "did you mean model.dim?"),
        ("learning_rate=1", "did you mean optimizer.lr?"),
        ("checkpoint.interval=10", "did you mean checkpoint.every?"),
        ("--resume", "checkpoint.continue_from=..."),
        ("--gpus 8", "cluster.gpus_per_node=8"),
        ("-n 4", "-n: unknown flag. titan-exp train has --cfg"),
        ("--cfg mine.yaml", "choose job, hydra or all, or give a configuration file with --config-path FILE"),
        ("--config-path nowhere", "no such folder or file"),
        ("--config-name nowhere", "has no file nowhere.yaml"),
        ("--experimental-rerun=x", "--config-path runs/NAME/ID"),
    ],
)
def test_of_train(line: str, remedy: str, capsys: pytest.CaptureFixture[str]):
    assert remedy in refusal(capsys, "train", *shlex.split(line))


def test_of_a_file_that_has_the_name_of_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert "CLASS" not in refusal(capsys, "train", "optimizer=cautious")
    Path("cautious.py").write_text("import torch\n\nCautious = torch.optim.SGD\n")
    said = refusal(capsys, "train", "optimizer=cautious")
    assert "type optimizer.name=cautious.CLASS" in said
    words = [
        "optimizer.name=cautious.Cautious",
        "model=llama_debug",
        "cluster.device=cpu",
        "plan.gate=off",
        "--dry-run",
    ]
    assert main(["train", *words]) == 0


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("run model=llama_debug", "titan-exp train model=llama_debug"),
        ("stop first", "titan-exp cancel first"),
        ("resume first", "titan-exp retry first"),
        ("help train", "titan-exp train --help"),
        ("sweep optimizers laptop", "size=laptop"),
        ("sweep optimizers quantization_recipes", "then titan-exp sweep quantization_recipes"),
        ("sweep optimizers.yaml", "titan-exp sweep optimizers"),
        ("sweep optimizers size=laptops", "did you mean laptop?"),
        ("compare first --csv out.csv", "--csv=out.csv"),
        ("generate first Once upon a time", "prompt='Once upon a time'"),
        ("generate prompts=nope", "no such file"),
        (f"status {'x' * 300}", "file name too long. Use a shorter name"),
        ("status ~nobody_here/x", "Write the path in full"),
    ],
)
def test_of_other_verbs(
    line: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert remedy in refusal(capsys, *shlex.split(line))


@pytest.mark.parametrize(
    "line",
    [
        "data.paths=[notes, books]",
        "data.paths=notes,books",
        "optimizer.betas='(0.9, 0.95)'",
        "experiment.notes=does it work",
        "experiment.notes='a,b'",
        "experiment.notes='${'",
        "training.steps=4k",
        "'training.steps=100;'",
        "training.steps:100",
        "optimizer.lr = 3",
        "llama3_8b",
        "++model=llama_debug",
        "experiment=smoke",
        "data.options.x=3",
    ],
)
def test_the_line_to_type_is_valid(line: str, capsys: pytest.CaptureFixture[str]):
    message = refusal(capsys, "train", *shlex.split(line))
    remedy = re.search(r"(?:write|type|Hydra:|out:|plus:|as one text:) (\S+?='[^']*'|\S+=[^\s;,]+)", message)
    assert remedy is not None, message
    assert main(["train", "--cfg", "job", *shlex.split(remedy[1])]) == 0, remedy[1]


def test_a_value_in_a_study_is_quoted_for_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The remedy is an entry of the YAML list, in quotes for YAML and for Hydra."""
    monkeypatch.chdir(tmp_path)
    study = "question: Why?\naxes: [{{list: {{short: [training.steps=20], half: [{}]}}}}]\nmetrics: {{loss: min}}\n"
    file = Path("sweeps", "own.yaml")
    file.parent.mkdir()
    for value in ("lr_schedule.warmup_steps=${share_of:0.5,${training.steps}}", "experiment.notes=it''s ${x y"):
        file.write_text(study.format(f"'{value}'"))
        message = refusal(capsys, "sweep", "own", "--dry-run")
        assert "They are in sweeps/own.yaml." in message
        line = re.search(r"once for YAML and once for Hydra: ('.*')$", message, re.MULTILINE)
        assert line is not None, message
        file.write_text(study.format(line[1]))
        assert main(["sweep", "own", "--dry-run"]) == 0, line[1]


def test_disks_and_names_are_no_tracebacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Errors of the machine are lines; errors that may be bugs stay tracebacks."""
    for error, words in (
        (OSError(30, "Read-only file system", "runs/a"), "runs/a: read-only file system"),
        (PermissionError(13, "Permission denied", "runs"), "runs: permission denied"),
        (RuntimeError("Could not determine home directory."), "Write the path in full"),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("titan_exp.cli.status.find_runs", fail)
        assert words in refusal(capsys, "status")
    for bug in (FileNotFoundError(2, "No such file or directory", "x"), RuntimeError("bug")):

        def crash(*_: object, bug: Exception = bug) -> None:
            raise bug

        monkeypatch.setattr("titan_exp.cli.status.find_runs", crash)
        with pytest.raises(type(bug)):
            main(["status"])


def test_a_status_survives_configurations_that_are_not_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "runs" / "first" / "abc").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "abc" / "config.yaml").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "first/abc" in capsys.readouterr().out
