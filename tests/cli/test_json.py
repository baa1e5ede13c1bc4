"""JSON of verbs for a program: one document on standard output whatever happens, and the exit codes."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compare.made_runs import make_study
from tests.launch.launching import LIMIT, start
from titan_exp.cli.main import EXIT_CODES, main
from titan_exp.config.command_line.output import answer, json_output, json_text, safe_output
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.extension import provided
from titan_exp.launch.local.executor import RunOutcome
from titan_exp.launch.run_console import summarize
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.tracking.run_folder.run_folder import RunState

REPOSITORY = Path(__file__).parents[2]
SMALL = ("model=llama_debug", "cluster.device=cpu", "plan.gate=off", "experiment.name=x", "training.steps=3")
Document = Callable[..., Any]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def document(home: Path, capsys: pytest.CaptureFixture[str]) -> Document:
    """Document of a command with `--json`, which is all of its standard output."""

    def run(*words: str, code: int = 0) -> Any:
        try:
            ended = main([*words, "--json"])
        except SystemExit as end:  # a sweep
            ended = end.code
        out, err = capsys.readouterr()
        assert ended == code, err
        assert "Traceback" not in err
        assert out.isascii()
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return run


@pytest.fixture
def study(home: Path) -> Path:
    return make_study(home / "runs", {1e-3: [3.1, 3.2, 3.3], 3e-3: [2.7, 2.8, 2.9]}, study="rates")


def train_as(monkeypatch: pytest.MonkeyPatch, state: str, code: int) -> None:
    """Let every run end in a state with an exit code, its loss not finite."""

    def run(plan: RunPlan, console: object = None) -> RunOutcome:
        create_run_folder(plan)
        reason = None if state == "done" else "a reason"
        row = {"step": 2, "tokens": 512, "loss": "NaN", "validation_loss": "Infinity", "attempt": 1}
        plan.folder.metrics.write_text(json.dumps(row) + "\n")
        plan.folder.write_state(RunState(state, 2, time.time(), 1, reason))  # type: ignore[arg-type]
        return RunOutcome(code, summarize(plan.folder))

    monkeypatch.setattr("titan_exp.launch.local.executor.run", run)
    monkeypatch.setattr("titan_exp.launch.run_plan._nondefault", lambda *_: "[]\n")  # half a second a run


@pytest.mark.parametrize(
    ("state", "code", "of_several"),
    [
        ("done", 0, 0),
        ("failed", 1, 1),
        ("failed", 2, 1),
        ("preempted", 85, 85),
        ("failed", 86, 1),
        ("preempted", 130, 130),
    ],
)
def test_exit_codes_of_runs(
    state: str, code: int, of_several: int, document: Document, monkeypatch: pytest.MonkeyPatch
):
    """Those of `train` are the run's; `sweep`, `train -m` and `retry` have the worst."""
    assert {code, of_several} <= EXIT_CODES.keys()
    train_as(monkeypatch, state, code)
    found = document("train", *SMALL, code=code)
    (run,) = found["runs"]
    assert (found["exit_code"], run["exit_code"], run["outcome"], run["state"]) == (code, code, state, state)
    assert run["folder"] == str(Path("runs/x", run["run_id"]).absolute())
    assert run["reason"] == (None if state == "done" else "a reason")
    assert (run["step"], run["steps"], run["tokens"]) == (2, 3, 512)
    assert (run["loss"], run["validation_loss"]) == (None, None), "a number that is not finite"

    found = document("train", "-m", *SMALL, "experiment.seed=1,2", code=of_several)
    assert (found["exit_code"], found["name"], found["question"]) == (of_several, "x", None)
    outcomes = [run["outcome"] for run in found["runs"]]
    assert outcomes == [state, "not started" if code == 130 else state]
    assert (found["conclusion"], found["registered"], found["skipped"]) == (None, None, [])

    if state == "failed":
        found = document("retry", run["run_id"], code=of_several)
        assert [run["outcome"] for run in found["runs"]] == ["failed"]
        assert found["exit_code"] == of_several
    else:
        found = document("retry", run["run_id"])
        assert (found["runs"], [run["state"] for run in found["skipped"]]) == ([], [state])


def test_cancel_of_a_sweep_is_no_interrupt(document: Document, home: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs that it leaves unstarted count as stopped ones."""
    train_as(monkeypatch, "preempted", 85)
    monkeypatch.setattr("titan_exp.launch.sweep.shipped_study.StudySweep.stop_requested", lambda self: True)
    (home / "sweeps").mkdir()
    axes = "axes: [{grid: {training.steps: [2, 3]}}]"
    (home / "sweeps/mine.yaml").write_text(f"question: How long?\nheld_fixed: [{', '.join(SMALL[:3])}]\n{axes}\n")
    found = document("sweep", "mine", code=85)
    assert (found["name"], found["question"]) == ("mine", "How long?")
    assert [run["outcome"] for run in found["runs"]] == ["not started", "not started"]
    assert [(run["state"], run["result"]) for run in document("cancel", "mine")["runs"]] == [("new", None)] * 2


@pytest.mark.parametrize(
    "words",
    [
        "train training.stesp=3",
        "train --skip",
        "train --cfg job",
        "train -m optimizer.lr=1e-3,-1",
        "train --nope",
        "sweep nope",
        "sweep --cfg job",
        "retry",
        "cancel nope",
        "status nope",
        "show",
        "diff one",
        "compare nope",
        "plan parallelism.tp=3",
        "plan search",
        "evaluate",
        "convert one",
        "logs nope",
        "generate nope",
        "doctor nope",
        "nope",
    ],
)
def test_a_refusal_is_a_document(words: str, document: Document, home: Path):
    found = document(*words.split(), code=2)
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "violations"}
    assert found["error"]["message"]
    assert list(home.iterdir()) == []


def test_violations_have_a_remedy(document: Document):
    error = document("train", "training.global_batch_size=7", "parallelism.dp_shard=2", code=2)["error"]
    assert error["message"] == "This run cannot start."
    (violation,) = error["violations"]
    assert violation.keys() == {"key", "value", "reason", "remedy"}
    assert (violation["key"], violation["value"]) == ("training.global_batch_size", 7)
    assert "training.global_batch_size=6 or 8" in violation["remedy"]


def test_verbs_that_read_runs(document: Document, study: Path):
    rows = document("status", "rates")
    assert [row["state"] for row in rows] == ["done"] * 6
    assert document("status", "paths.runs=elsewhere") == []
    one, other = rows[0]["run_id"], rows[3]["run_id"]
    assert document("show", one)["status"]["run_id"] == one
    assert document("diff", one, other)
    found = document("compare", "rates")
    assert (len(found["rows"]), found["registered"]) == (2, None)
    assert document("retry", "rates") == {
        "exit_code": 0,
        "runs": [],
        "skipped": [{"label": row["label"], "state": "done", "reason": None} for row in rows],
    }
    found = document("cancel", one)
    assert ([run["result"] for run in found["runs"]], found["stopped_sweeps"]) == ([None], [])
    assert "decay_shape" in [entry["name"] for entry in document("sweep")]


def test_a_table_may_stand_beside_a_file(study: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", str(study), "--json=found.json", "--html=none"]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert json.loads(Path("found.json").read_text())["name"] == "rates"


def test_dry_runs(document: Document, home: Path):
    found = document("train", *SMALL, "--dry-run")
    (run,) = found["runs"]
    assert (found["dry_run"], run["state"], run["steps"], run["processes"]) == (True, "new", 3, 1)
    cluster = ("cluster=slurm", "cluster.gpus_per_node=2", "cluster.time_limit=1:00:00", "parallelism.dp_shard=2")
    words = (*SMALL[:1], *SMALL[2:], *cluster, "training.global_batch_size=2,3", "experiment.seed=0,1")
    found = document("train", "-m", "--skip", *words, "--dry-run")
    assert [run["gpu_hours_asked"] for run in found["runs"]] == [2.0, 2.0]
    assert [skipped["label"][-6:] for skipped in found["skipped"]] == ["seed=0", "seed=1"]
    assert "training.global_batch_size=2 or 4" in found["skipped"][0]["reason"]
    (script,) = found["scripts"]
    assert (script["script"][:11], len(script["run_ids"])) == ("#!/bin/bash", 2)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ValueError("a bug"), None)])
def test_any_other_end_is_a_document(
    error: BaseException,
    code: int | None,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("titan_exp.cli.status.status_rows", fail)
    if code is None:
        with pytest.raises(ValueError, match="a bug"):
            main(["status", "--json"])
    else:
        assert main(["status", "--json"]) == code
    found = json.loads(capsys.readouterr().out)["error"]
    assert found["message"] == ("KeyboardInterrupt" if code else "ValueError: a bug")


def test_help_and_verbs_of_extensions_print_what_they_print(home: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["retry", "--json", "--help"]) == 0
    assert capsys.readouterr().out.startswith("titan-exp retry:")
    for verb in (name for name in provided("verbs") if " " not in name):
        assert main([verb, "--json"]) == 2
        assert capsys.readouterr().out == ""


def test_the_log_of_a_run_is_no_part_of_the_document(home: Path):
    """In a process of its own, as `titan-exp train --json | jq .` has it."""
    process = start("succeed", "train", *SMALL, "--json")
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    (run,) = json.loads(out)["runs"]
    assert (run["state"], run["loss"]) == ("done", 1.5)
    assert "hello from rank 0" in err
    assert "done after step 2" in err


def test_children_and_native_code_print_to_standard_error(capfd: pytest.CaptureFixture[str]):
    with json_output():
        print("by Python")
        os.write(1, b"by native code\n")
        subprocess.run(["echo", "by a child"], check=True)
        answer({"value": float("nan")})
    print("after")
    out, err = capfd.readouterr()
    assert json.loads(out.removesuffix("after\n")) == {"value": None}
    assert {*err.splitlines()} == {"by Python", "by native code", "by a child"}


def test_an_error_after_the_answer_replaces_it(capsys: pytest.CaptureFixture[str]):
    def fail() -> None:
        with json_output():
            answer([1])
            raise UserError("No.", [Violation("key", Path("there"), "why", "what")])

    with pytest.raises(UserError):
        fail()
    violation = {"key": "key", "value": "there", "reason": "why", "remedy": "what"}
    assert json.loads(capsys.readouterr().out) == {"error": {"message": "No.", "violations": [violation]}}


def test_any_text_survives(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Also through standard output that makes control characters visible."""
    text = "".join(map(chr, range(0x20, 0x100))) + "\x1b[2K → \u202e \udcff \"\\'"
    safe_output()
    print(json_text({"text": text, "numbers": (1, 2.5, -float("inf"))}))
    assert json.loads(capsys.readouterr().out) == {"text": text, "numbers": [1, 2.5, None]}


def test_help_and_the_guide_have_all_exit_codes(capsys: pytest.CaptureFixture[str]):
    assert main(["help"]) == 0
    printed = capsys.readouterr().out.partition("Exit codes\n")[2]
    page = (REPOSITORY / "docs/guides/programs.md").read_text()
    for text, pattern in ((printed, r"^  (\d+) "), (page, r"^\| (\d+) \|")):
        assert [int(code) for code in re.findall(pattern, text, re.M)] == list(EXIT_CODES)
