"""How runs stand by their files, how they are named, and what is printed of them."""

import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from titan_exp.cli.main import main
from titan_exp.config.command_line.options import take_options, take_runs
from titan_exp.config.command_line.verb_options import GenerateOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch import run_status as run_status_module
from titan_exp.launch.executor import JobStatus
from titan_exp.launch.run_console import describe, summarize
from titan_exp.launch.run_lookup import find_runs, run_path
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.launch.run_status import run_status, status_rows
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def experiment():
    return to_experiment(compose(["model=llama_debug", "cluster.device=cpu", "training.steps=10", "experiment.name=x"]))


@pytest.fixture
def make(home: Path, experiment):
    """A run's folder with one start of it, in some state."""

    def run(seed: int, state: str | None, *, step: int = 4, hosts: tuple[str, ...] = (), ago: float = 0.0, by="local"):
        made = plan_run(replace(experiment, experiment=replace(experiment.experiment, seed=seed)))
        create_run_folder(made)
        folder = made.folder
        if state is not None:
            folder.add_attempt(world_size=2, hosts=hosts or (socket.gethostname(),), launched_by=by, job_id="77")
            folder.update_attempt(1, start=time.time() - 7200, intent=time.time() - max(ago, 1))
            reason = {"failed": "out of luck", "preempted": "titan-exp cancel"}.get(state)
            folder.write_state(RunState(cast(Any, state), step, time.time() - ago, 1, reason))
        return folder

    return run


def log(folder: RunFolder, step: int, **values: float | None) -> None:
    row = {"step": step, "tokens": step * 100, "loss": 3.0, "tokens_per_second": 50.0, "attempt": 1, **values}
    with folder.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_run_state_from_its_files(make):
    assert run_status(make(0, None)).state == "new"
    assert run_status(make(1, "done")).state == "done"
    assert (run_status(make(2, "failed")).state, run_status(make(2, "failed")).reason) == ("failed", "out of luck")
    lost = run_status(make(3, "running", ago=600))
    assert lost.state == "lost"
    assert "died without a record" in (lost.reason or "")
    assert "10m 00s ago" in (lost.reason or "")
    held = make(4, "running", ago=600)
    with held.claim("launcher"):
        assert run_status(held).state == "running"
    # Locks may not be seen from another machine: a fresh sign of life counts there.
    assert run_status(make(5, "running", hosts=("elsewhere",))).state == "running"
    assert run_status(make(6, "running", hosts=("elsewhere",), ago=600)).state == "lost"
    broken = make(7, "done")
    broken.state.write_text("no")
    assert run_status(broken).state == "unreadable"


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("running", JobStatus("queued", "78", "Priority"), ("queued", "Priority", "78")),
        ("running", JobStatus("running", "77"), ("running", None, "77")),
        ("running", JobStatus("gone", "77", "NODE_FAIL"), ("lost", "NODE_FAIL", "77")),
        ("preempted", JobStatus("queued", "77", "BeginTime"), ("queued", "BeginTime", "77")),
        ("preempted", JobStatus("gone"), ("preempted", "titan-exp cancel", "77")),
        (
            "preempted",
            JobStatus("gone", "77", "preempted"),
            ("preempted", "titan-exp cancel; SLURM preempted the job", "77"),
        ),
        ("failed", JobStatus("unknown"), ("failed", "out of luck", "77")),
        ("running", JobStatus("unknown", "77", "no answer"), ("unknown", "slurm does not answer: no answer", "77")),
    ],
)
def test_state_from_the_scheduler(
    make, monkeypatch: pytest.MonkeyPatch, state: str, status: JobStatus, expected: tuple
):
    asked: list[str] = []

    class Scheduler:
        def status(self, folders):
            return {folder.path: status for folder in folders}

    monkeypatch.setattr(run_status_module, "executor_for", lambda kind: asked.append(kind) or Scheduler())
    folder = make(0, state, hosts=("node1",), by="slurm")
    folder.heartbeat.unlink(missing_ok=True)
    if state != "running":
        folder.update_attempt(1, end=time.time())
    now = run_status(folder)
    assert (now.state, now.reason, now.job_id) == expected
    assert asked == ["slurm"]
    assert run_status(make(1, "done", by="slurm")).state == "done"
    assert asked == ["slurm"]


def test_runs_by_path_id_and_label(make, home: Path):
    first, second = make(0, "done"), make(1, "failed")
    runs = home / "runs"
    assert {entry.folder.path for entry in find_runs(["x"], runs)} == {first.path, second.path}
    assert [entry.folder.path for entry in find_runs([first.path.name[:6]], runs)] == [first.path]
    assert [entry.folder.path for entry in find_runs([f"x/{first.path.name}"], runs)] == [first.path]
    assert [entry.folder.path for entry in find_runs([str(second.path), second.path.name], runs)] == [second.path]
    assert take_runs(["paths.runs=there", "x"]) == ("there", ["x"])
    assert take_runs(['paths.runs="over there"']) == ("over there", []), "as train takes it"
    options, rest = take_options(GenerateOptions, ["optimizers/change=none,seed=0", "tokens=3"], positional=["run"])
    assert (options.run, options.tokens, rest) == ("optimizers/change=none,seed=0", 3, [])
    urls = [
        f"s3://bucket/runs/x/{first.path.name}",
        f"https://wandb.ai/a/b/runs/{first.path.name}",
        f"file://{first.path}",
    ]
    for url in urls:
        assert [entry.folder.path for entry in find_runs([url], runs)] == [first.path]
    assert {entry.folder.path for entry in find_runs(["x/*"], runs)} == {first.path, second.path}
    assert {entry.folder.path for entry in find_runs(["runs/x/*"], runs)} == {
        Path("runs/x") / first.path.name,
        Path("runs/x") / second.path.name,
    }
    for word, says in {
        "s3://bucket/x/0123": "has none of this one",
        "x/9*": "x has no such run",
        "y": "Those in",
        "0000": "unknown run",
        f"x/{'0' * 12}": "x has no such run",
        "xx": "unknown run",
    }.items():
        with pytest.raises(UserError, match=says):
            find_runs([word], runs)


VERBS = ("status", "show", "diff", "logs", "cancel", "retry", "compare", "generate", "evaluate", "convert")
"""Verbs that read runs."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_spells_the_folder_of_runs_alike(verb: str, home: Path, capsys: pytest.CaptureFixture[str]):
    """`paths.runs=` as in `train`, with dashes too, and as `generate` once had it."""
    words = ["nope", "nope"] if verb in ("diff", "convert") else ["nope"]
    for spelling in (["paths.runs=there"], ["--paths.runs=there"], ["--paths.runs", "there"], ["runs=there"]):
        assert main([verb, *words, *spelling]) == 2
        assert "There is no run under there/" in capsys.readouterr().err
    assert main([verb, "--help"]) == 0
    assert "paths.runs=" in capsys.readouterr().out


def test_folders_of_other_users_that_are_closed_are_left_out(
    make, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make(0, "done")
    closed = home / "runs" / "closed" / "0123456789ab"
    closed.mkdir(parents=True)
    (closed / "config.yaml").touch()
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: "closed" not in path.parts and access(path, mode))
    assert main(["status"]) == 0
    assert "1 run: " in capsys.readouterr().out
    assert main(["status", "0123"]) == 2


def test_a_name_becomes_a_folder_and_a_path_stays(make, home: Path):
    first, second = make(0, "done"), make(1, "failed")
    runs = home / "runs"
    assert run_path(first.path.name[:6], runs) == run_path(f"x/{first.path.name}", runs) == str(first.path)
    for path in (str(second.path), "s3://bucket/run", "nowhere/weights", "weights.pt"):
        assert run_path(path, runs) == path
    with pytest.raises(UserError, match=rf"(?s)x: this matches 2 runs\. Name one of them:.*x/{first.path.name}"):
        run_path("x", runs)
    with pytest.raises(UserError, match="y: unknown run or study"):
        run_path("y", runs)


def test_status_table(make, experiment, capsys: pytest.CaptureFixture[str]):
    running, failed = make(0, "running"), make(1, "failed")
    log(failed, 4)
    log(running, 5)
    log(running, 6, loss=2.5, mfu=0.25)
    with running.claim("launcher"):
        assert main(["status", "x"]) == 0
        (row,) = [row for row in status_rows(find_runs(["x"], Path("runs"))) if row.state == "running"]
    out = capsys.readouterr().out
    assert (row.step, row.steps, row.loss, row.mfu, row.seconds_left) == (6, 10, 2.5, 0.25, 4 * 100 / 50)
    assert all(
        text in out for text in ("6/10", "4/10", "2.5000", "25.0%", "8s", "out of luck", "1 running", "1 failed")
    )
    assert row.gpu_hours is None
    quarter = experiment.training.global_batch_size // 4
    ramp = f"  batch_ramp:\n  - - 6\n    - {quarter}"
    running.config.write_text(running.config.read_text().replace("  batch_ramp: []", ramp))
    with running.claim("launcher"):
        (row,) = [row for row in status_rows(find_runs(["x"], Path("runs"))) if row.state == "running"]
    assert row.seconds_left == 4 * 4 * 100 / 50
    assert main(["status", "x", "--json"]) == 0
    assert {row["state"] for row in json.loads(capsys.readouterr().out)} == {"lost", "failed"}
    assert main(["status", "paths.runs=nowhere"]) == 0
    assert "There is no run under nowhere/" in capsys.readouterr().out


def test_a_requested_stop_is_not_called_a_preemption(make, capsys: pytest.CaptureFixture[str]):
    folder = make(0, "preempted")
    folder.update_attempt(1, end=time.time(), exit=85, reason="titan-exp cancel")
    for verb, text in {
        "status": "stopped: x/",
        "show": "stopped: titan-exp cancel",
        "logs -f": "==> stopped: titan-exp cancel <==",
        "retry": "Left alone: 1 stopped. titan-exp train",
        "cancel": "No run is queued or running: 1 stopped.",
    }.items():
        assert main([*verb.split(), str(folder.path)]) == 0, verb
        out = capsys.readouterr().out
        assert (text in out, "preempted" in out) == (True, False), (verb, out)
    assert main(["status", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "preempted"
    summary = summarize(folder)
    assert describe(summary, 10) == "stopped after step 4 of 10 (titan-exp cancel)"
    by_slurm = replace(summary, reason="SLURM preempted the job before its time limit")
    assert describe(by_slurm, 10).startswith("preempted after step 4 of 10 (SLURM preempted")


@pytest.mark.parametrize("columns", [60, 80, None])
def test_a_run_has_one_line_however_narrow_the_terminal(
    make, columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folders = [make(seed, "failed" if seed < 4 else "done") for seed in range(6)]
    folders[0].write_state(RunState("failed", 4, time.time(), 1, "no space left on the disk of this machine " * 3))
    log(folders[5], 4, **{"probe/a_number_with_a_long_name": 1.0}, mfu=0.5)
    config = folders[5].config.read_text()
    folders[5].config.write_text(config.replace("\n  parts: {}\n", "\n  parts: {probe: {name: a.B, options: {}}}\n"))
    monkeypatch.setenv("COLUMNS", str(columns)) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["status"]) == 0
    out = capsys.readouterr().out.splitlines()
    table = out[1 : out.index("")]
    assert [line.split()[0] for line in table] == [
        f"x/{entry.folder.path.name}" for entry in find_runs([], Path("runs"))
    ]
    assert [line.split()[1:3] for line in table if folders[5].path.name in line] == [["done", "4/10"]]
    assert sum("out of luck" in line for line in out) == 1
    assert sum("no space left" in line for line in out) >= 1
    assert sum(line.startswith("failed: ") for line in out) == 2, "one reason for three runs, another for one"
    assert any("probe/a_number_with_a_long_name" in line for line in out)
    if columns is not None:
        assert max(map(len, out)) <= columns


def test_warning_of_a_running_run(make, capsys):
    running = make(2, "running", ago=5)
    running.beat(4, force=True, warning="we cannot write a checkpoint")
    with running.claim("launcher"):
        assert main(["status", "x"]) == 0
        assert "we cannot write a checkpoint" in capsys.readouterr().out
        assert main(["status", "x", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["warning"] == "we cannot write a checkpoint"
        running.write_state(RunState("running", 4, time.time() + 1, 2, None))  # a newer attempt
        assert [row.warning for row in status_rows(find_runs(["x"], Path("runs")))] == [None]
    running.write_state(RunState("failed", 4, time.time() - 10, 1, None))
    assert [row.warning for row in status_rows(find_runs(["x"], Path("runs")))] == [None]


def test_gpu_hours(make):
    folder = make(0, "done")
    folder.update_attempt(1, start=1000.0, end=1000.0 + 1800)
    folder.config.write_text(folder.config.read_text().replace("device: cpu", "device: cuda"))
    (row,) = status_rows(find_runs([str(folder.path)], Path("runs")))
    assert row.gpu_hours == pytest.approx(1.0)


def test_logs_of_a_rank_and_an_attempt(make, capsys: pytest.CaptureFixture[str]):
    folder = make(0, "failed")
    folder.add_attempt(world_size=2, hosts=["here"])
    for attempt in (1, 2):
        folder.attempt_logs(attempt).mkdir(parents=True)
        for rank in (0, 1):
            (folder.attempt_logs(attempt) / f"rank-{rank:05d}.log").write_text(f"attempt {attempt} rank {rank} spoke\n")
    record = {"rank": 1, "pid": 1, "host": "here", "start": 1.0, "end": 2.0, "exit": 1, "error": None}
    (folder.attempt_logs(2) / "rank-00001.json").write_text(json.dumps(record))
    cases = {(): "attempt 2 rank 1", ("--rank", "0"): "attempt 2 rank 0", ("--attempt", "1"): "attempt 1 rank 0"}
    for words, expected in cases.items():
        assert main(["logs", str(folder.path), *words]) == 0
        assert f"{expected} spoke" in capsys.readouterr().out
    assert main(["logs", "-f", str(folder.path), "--attempt", "1"]) == 0
    assert "attempt 1 rank 0 spoke" in capsys.readouterr().out
    for words, says in {("--rank", "7"): "it has ranks 0 to 1", ("--attempt", "3"): "--attempt 1 to 2"}.items():
        assert main(["logs", str(folder.path), *words]) == 2
        assert says in capsys.readouterr().err
    make(1, "done")
    assert main(["logs", "x", "-f"]) == 2
    assert "this matches 2 runs" in capsys.readouterr().err
    assert main(["logs", "x"]) == 0
    assert "out of luck" in capsys.readouterr().out


def test_a_queued_run_says_so_instead_of_a_log(
    make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    statuses = [JobStatus("queued", "77", "pending: Priority")]

    class Scheduler:
        def status(self, folders):
            return {folder.path: statuses[0] if len(statuses) == 1 else statuses.pop(0) for folder in folders}

    monkeypatch.setattr(run_status_module, "executor_for", lambda kind: Scheduler())
    folder = make(0, None)
    assert main(["logs", str(folder.path)]) == 2
    assert f"titan-exp train --config-path {folder.path} paths.runs=" in capsys.readouterr().err
    folder.add_attempt(world_size=2, hosts=(), launched_by="slurm", token="x")
    folder.update_attempt(1, intent=time.time() - 7500)
    folder.write_state(RunState("pending", 0, time.time(), 0, None))
    name = f"runs/x/{folder.path.name}"
    assert main(["logs", name]) == 2
    out = capsys.readouterr().err
    assert "no such log" not in out
    assert "2h 05m ago, job 77, pending: Priority" in out
    assert f"To follow it once it starts, type titan-exp logs -f {name}." in out
    statuses += [JobStatus("gone", "77", "cancelled")] * 2
    assert main(["logs", "-f", name]) == 0
    assert capsys.readouterr().out.startswith("==> queued since ")


def test_a_finished_run_has_one_speed(make, capsys: pytest.CaptureFixture[str]):
    """At its end, and in every table."""
    folder = make(0, "done", step=6)
    for step, speed in enumerate((None, 400.0, 100.0, 90.0, 80.0, 70.0), 1):
        log(folder, step, tokens_per_second=speed)
    assert describe(summarize(folder), 6).endswith(", 70 tokens/s")
    (row,) = status_rows(find_runs([], Path("runs")))
    assert row.tokens_per_second == 70
    assert main(["show", str(folder.path)]) == 0
    assert ", 70 tokens/s" in capsys.readouterr().out


def test_a_run_that_never_started_is_new_everywhere(make, capsys: pytest.CaptureFixture[str]):
    folder = make(0, None)
    assert describe(summarize(folder), 10).startswith("new after step 0")
    for words in (["status", "x"], ["compare", "x", "--html=none"]):
        assert main(words) == 0
        assert " new" in capsys.readouterr().out, words


def test_numbers_of_parts_of_the_users_own_are_shown(make, capsys: pytest.CaptureFixture[str]):
    folder = make(0, "done")
    text = folder.config.read_text()
    assert "\n  parts: {}\n" in text
    folder.config.write_text(text.replace("\n  parts: {}\n", "\n  parts:\n    probe: {name: a.Probe, options: {}}\n"))
    log(folder, 4, **{"probe/max_logit": 7.5, "other/number": 1.0})
    assert main(["status", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["reported"] == {"probe/max_logit": 7.5}
    assert main(["status"]) == 0
    assert "probe/max_logit" in capsys.readouterr().out
