"""One run in words: what differs from the defaults, where it comes from, where it stands, how to go on."""

import json
import shlex
import time
from pathlib import Path

import pytest
import yaml

from titan_exp.cli.main import main
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_dict, to_experiment
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.tracking.run_folder.run import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState
from titan_exp.trainer.restore import log_head

TYPED = ["model=llama_debug", "training.steps=10", "cluster.device=cpu", "experiment.name=x", "parallelism.dp_shard=1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(*overrides: str, state: str | None = None, step: int = 10, saved: tuple[int, ...] = ()) -> RunFolder:
    """Run folder as a launch writes it, with an attempt in a state."""
    plan = plan_run(to_experiment(compose([*TYPED, *overrides])), [*TYPED, *overrides])
    create_run_folder(plan)
    folder = plan.folder
    if state is not None:
        folder.add_attempt(world_size=2, hosts=("node1", "node2"), launched_by="slurm", job_id="77")
        end = None if state == "running" else time.time()
        exits = {"done": 0, "preempted": 85, "failed": 1}
        folder.update_attempt(1, start=time.time() - 90, end=end, exit=exits.get(state))
        reason = "rank 0: out of luck" if state == "failed" else None
        folder.write_state(RunState(state, step, time.time(), 1, reason))  # type: ignore[arg-type]
    for number in saved:
        path = folder.checkpoints / f"step-{number:08d}"
        path.mkdir(parents=True)
        (path / ".metadata").write_bytes(b"x" * 2048)
    partial = folder.checkpoints / "step-00000099.partial"
    partial.mkdir(parents=True)
    (partial / ".metadata").touch()
    row = {"step": step, "tokens": 100 * step, "loss": 2.5, "tokens_per_second": 5000.0, "attempt": 1}
    folder.metrics.write_text(json.dumps(row) + "\n")
    return folder


def shown(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["show", *words]) == 0
    return capsys.readouterr().out


def commands(text: str) -> dict[str, str]:
    lines = text.partition("\ncommands\n")[2].splitlines()
    return {purpose.strip(): command for purpose, _, command in (line.partition("  titan-exp ") for line in lines)}


def typed_command(text: str) -> list[str]:
    """Overrides of the printed command, as a shell splits it."""
    block = text.partition("\ndiffers from the defaults\n")[2].partition("\n\n")[0]
    words = shlex.split(block.replace(" \\\n", " "))
    assert words[:2] == ["titan-exp", "train"]
    return words[2:]


def test_a_finished_run(home: Path, capsys: pytest.CaptureFixture[str]):
    folder = make("experiment.notes='a long, long note'", state="done", saved=(5, 10))
    text = shown(folder.path.name[:6], capsys=capsys)
    name = f"x/{folder.path.name}"
    assert text.splitlines()[0] == f"{name}  runs/{name}"
    assert "done after step 10 of 10\n  loss 2.5000, 5,000 tokens/s" in text
    assert sorted(typed_command(text)) == sorted([*TYPED, "experiment.notes='a long, long note'"])
    composed = plan_run(to_experiment(compose(typed_command(text))))
    assert composed.folder.path == folder.path.absolute()
    assert "1m 30s  2 processes on node1 and 1 more, job 77  done" in text
    assert "  step 5  2 KiB\n  step 10  2 KiB\n" in text
    assert "step 99" not in text
    assert commands(text) == {
        "extend": f"retry {name} training.steps=20",
        "branch off a decay": f"retry {name} checkpoint.continue_step=5 training.steps=6 lr_schedule.decay_steps=1 "
        "lr_schedule.decay=linear",
        "generate": f"generate {name} prompt=Once",
        "evaluate": f"evaluate {name}",
        "compare": f"compare {name}",
    }
    assert "\nlineage\n" not in text


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("failed", {"retry": "retry RUN", "log": "logs RUN", "compare": "compare RUN"}),
        ("preempted", {"start": "train --config-path runs/RUN", "compare": "compare RUN"}),
        (None, {"start": "train --config-path runs/RUN", "compare": "compare RUN"}),
    ],
)
def test_commands_of_other_states(home: Path, capsys: pytest.CaptureFixture[str], state: str | None, expected: dict):
    folder = make(state=state, step=4)
    text = shown(str(folder.path), capsys=capsys)
    name = f"x/{folder.path.name}"
    assert commands(shown(f"runs/{name}", capsys=capsys)) == {
        purpose: command.replace("RUN", name) for purpose, command in expected.items()
    }
    assert ("rank 0: out of luck" in text) == (state == "failed")
    if state != "failed":  # in its folder, from wherever it is typed
        path = folder.path.absolute()
        found = commands(shown(str(path), capsys=capsys))
        assert found["start"] == f"train --config-path {path} paths.runs={path.parents[1]}"


def test_parents_and_children(home: Path, capsys: pytest.CaptureFixture[str]):
    first, child = make(state="done", saved=(10,)), make("training.steps=20", state="done", step=20, saved=(20,))
    Lineage(str(first.path), 10, 1000).write(child.path)
    grandchild = make("training.steps=30", state="done", step=30)
    Lineage(str(child.path), 20, 2000).write(grandchild.path)
    names = {folder: f"x/{folder.path.name}" for folder in (first, child, grandchild)}
    text = shown(names[child], capsys=capsys)
    assert f"continued from {names[first]} after step 10" in text
    assert f"continued by {names[grandchild]} after step 20" in text
    assert commands(text)["compare"] == f"compare {names[first]} {names[child]} {names[grandchild]}"
    assert commands(text)["differences"] == f"diff {names[first]} {names[child]}"
    found = json.loads(shown(names[grandchild], "--json", capsys=capsys))
    assert found["parents"] == [{"run": names[child], "step": 20}, {"run": names[first], "step": 10}]
    assert found["status"]["parent"] == names[child]
    assert commands(shown(names[first], capsys=capsys))["differences"] == f"diff {names[first]} {names[child]}"


def test_weights_alone_are_not_continued(home: Path, capsys: pytest.CaptureFixture[str]):
    folder = make("checkpoint.last=weights", state="done", saved=(10,))
    found = commands(shown(str(folder.path), capsys=capsys))
    assert "extend" not in found
    assert "generate" in found


def test_a_foreign_folder_is_read_alone(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "hunter2hunter2")
    (home / "evil.py").write_text("raise SystemExit('imported')\n")
    values = to_dict(to_experiment(compose(TYPED)))
    values["model"]["architecture"] = "evil.Model"
    values["optimizer"]["name"] = "evil"
    values["experiment"]["notes"] = "${oc.env:SECRET_OF_MINE}"
    folder = RunFolder(home / "there" / "theirs" / "0123")
    folder.path.mkdir(parents=True)
    folder.config.write_text(yaml.safe_dump(values))
    text = shown(str(folder.path), capsys=capsys)
    assert "hunter2" not in text
    assert {"model.architecture=evil.Model", "optimizer.name=evil"} <= set(typed_command(text))
    assert "experiment.notes='${oc.env:SECRET_OF_MINE}'" in typed_command(text)
    assert f"train --config-path {folder.path}" in text


def test_mistakes_are_explained(home: Path, capsys: pytest.CaptureFixture[str]):
    make(state="done")
    make("training.steps=20", state="done")
    for words, says in {
        (): "Name one run: titan-exp show RUN",
        ("x",): "this matches 2 runs. Name one of them",
        ("y",): "unknown run or study",
        ("x", "--jsn"): "Did you mean --json?",
    }.items():
        assert main(["show", *words]) == 2
        assert says in capsys.readouterr().err


def test_the_head_of_a_log(home: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    first, child = make(state="done"), make("experiment.seed=1", "experiment.notes='so it is'", state="done")
    Lineage(str(first.path), 10, 1000).write(child.path)
    caplog.set_level("INFO", "titan_exp")
    log_head(child)
    (differs, lineage) = caplog.messages
    words = shlex.split(differs.removeprefix("values that differ from the defaults: "))
    assert words == typed_command(shown(str(child.path), capsys=capsys))
    assert lineage == f"continued from x/{first.path.name} after step 10"
    caplog.clear()
    first.nondefault.write_text("[]\n")
    log_head(first)
    assert caplog.messages == ["values that differ from the defaults: none"]


@pytest.mark.parametrize("end", [None, 1.0])
def test_a_job_that_has_not_started_has_no_hosts(home: Path, capsys: pytest.CaptureFixture[str], end: float | None):
    folder = make()
    folder.add_attempt(world_size=16, hosts=(), launched_by="slurm", token="feed", end=end, reason="not submitted: no")
    text = shown(str(folder.path), capsys=capsys)
    assert ("16 processes  not started" in text) is (end is None)
    assert ("16 processes  ended without a record: not submitted: no" in text) is (end is not None)
