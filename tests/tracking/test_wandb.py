"""Real W&B, offline, in separate processes; no network."""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics

RUN = """
import json, os, sys
from pathlib import Path
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.tracking.sinks import build_sinks
from titan_exp.tracking.logging import configure_logging

order = json.load(sys.stdin)
folder = Path(order["folder"])
folder.mkdir(exist_ok=True)
configure_logging(0, folder / "logs")
experiment = resolve_layout(to_experiment(compose(["model=llama_debug", "tracking=wandb", *order["overrides"]])), 1)
sinks = build_sinks(experiment, folder, "3f2a", order["attempt"])
for step in order["steps"]:
    if step == order["kill_at"]:
        import psutil
        for child in psutil.Process().children(recursive=True):
            child.kill()
            child.wait(10)
    for sink in sinks:
        row = {"step": step, "loss": 10.0 - min(step, 6 - step), "grad_norm": float("nan"), "mfu": None}
        sink.log({**row, "router/z_loss": 0.5, "router/entropy": 1.5})
        if step == order["late"] and hasattr(sink, "late"):
            sink.late("tasks/step", {"tasks/step": 1, "tasks/toy/perplexity": 3.5, "tasks/toy/acc": None})
for sink in sinks:
    sink.close(order["state"])
os._exit(0) if order["kill_at"] else sys.exit(0)  # wandb's own exit handler prints a traceback of the dead service
"""

KEY = "0123456789abcdef" * 3
NOWHERE = "http://127.0.0.1:9"
"""The discard port of this machine, where nobody listens."""


def environment(home: Path, **also: str) -> dict[str, str]:
    """Ours, without whatever W&B account this machine has."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_") and key != "NETRC"}
    own = {"HOME": str(home), "WANDB_ERROR_REPORTING": "false", "WANDB_CONFIG_DIR": str(home / "config")}
    return {**kept, **own, "WANDB_CACHE_DIR": str(home / "cache"), "WANDB_DATA_DIR": str(home / "data"), **also}


def train(
    tmp_path: Path,
    *,
    steps: list[int],
    overrides: tuple[str, ...] = (),
    attempt: int = 1,
    state: str = "done",
    kill_at: int | None = None,
    late: int | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """A run without training in `tmp_path/run`; returns what it printed."""
    (tmp_path / "home").mkdir(exist_ok=True)
    order = {
        "folder": str(tmp_path / "run"),
        "steps": steps,
        "overrides": overrides,
        "attempt": attempt,
        "state": state,
        "kill_at": kill_at,
        "late": late,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        input=json.dumps(order),
        cwd=tmp_path / "home",
        env=environment(tmp_path / "home", **(env or {})),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@cache
def can_inspect() -> bool:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--help"]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def directories(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))


def inspect(directory: Path, *flags: str) -> str:
    if not can_inspect():
        pytest.skip("this version of wandb cannot read its own files")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *flags, str(directory)]
    env = environment(directory.parent)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def records(directory: Path, kind: str) -> list[Any]:
    lines = [json.loads(line) for line in inspect(directory).splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


def logged_steps(directory: Path) -> list[int]:
    return [record["item"]["step"] for record in records(directory, "history")]


def test_offline_run_in_its_folder_prints_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, steps=[1, 2, 3]) == ""
    [directory] = directories(tmp_path)
    assert list(directory.glob("run-*.wandb"))
    assert not (tmp_path / "home" / "wandb").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]


def test_run_metadata_and_metrics(tmp_path: Path) -> None:
    train(tmp_path, steps=[1, 2, 3, 4], overrides=("experiment.name=heads", "tracking.wandb_project=p"), late=3)
    [directory] = directories(tmp_path)
    summary = json.loads(inspect(directory, "--summary"))
    assert summary["run_id"] == (tmp_path / "run" / "wandb" / "id").read_text()
    assert (summary["project"], summary["name"], summary["exit_code"]) == ("p", "3f2a", 0)
    assert summary["config"]["model"]["layers"] == 4
    assert summary["config"]["run"]["world_size"] == 1
    assert summary["summary"]["loss"] == {"min": 7}
    [run] = records(directory, "run")
    assert (run["run_group"], run["job_type"], run["resume"]) == ("heads", "train", True)
    defined = {metric.get("name") or metric["glob_name"]: metric for metric in records(directory, "metric")}
    assert {metric["step_metric"] for name, metric in defined.items() if "tasks" not in name} == {"step"}
    assert defined["tasks/toy/perplexity"]["step_metric"] == "tasks/step"
    minimized = {name for name, metric in defined.items() if metric.get("summary", {}).get("min")}
    assert minimized == {"loss", "router/z_loss"}
    history = [record["item"] for record in records(directory, "history")]
    late = history.pop(3)
    assert {name: value for name, value in late.items() if not name.startswith("_")} == {
        "step": 3,  # of the row before it
        "tasks/step": 1,
        "tasks/toy/perplexity": 3.5,
    }
    assert [row["step"] for row in history] == [1, 2, 3, 4]
    assert [row["loss"] for row in history] == [9, 8, 7, 8]
    assert history[0]["grad_norm"] == "NaN"
    assert "mfu" not in history[0]
    assert history[0]["router/entropy"] == 1.5, "any further column is logged"


def test_newest_offline_directory_is_complete_after_a_resume(tmp_path: Path) -> None:
    train(tmp_path, steps=[1, 2, 3, 4], state="preempted")
    time.sleep(1)  # a directory is named by the second of its start
    train(tmp_path, steps=[3, 4, 5], attempt=2)
    latest = (tmp_path / "run" / "wandb" / "latest-run").resolve()
    assert latest in directories(tmp_path)
    run_id = (tmp_path / "run" / "wandb" / "id").read_text()
    assert [directory.name.endswith(run_id) for directory in directories(tmp_path)] == [True, True]
    assert logged_steps(latest) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("preempted", 85)])
def test_final_state(tmp_path: Path, state: str, code: int) -> None:
    train(tmp_path, steps=[1], state=state)
    [directory] = directories(tmp_path)
    assert [record["exit_code"] for record in records(directory, "exit")] == [code]
    assert len(records(directory, "preempting")) == (state == "preempted")


def test_killed_wandb_is_one_warning(tmp_path: Path) -> None:
    text = train(tmp_path, steps=list(range(1, 30)), kill_at=3)
    assert text.count("warning: W&B gets no more metrics") == 1
    assert "tracking.wandb=false" in text
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 30))


def test_unreachable_server_leaves_the_run_offline_without_key(tmp_path: Path) -> None:
    env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": NOWHERE, "WANDB_INIT_TIMEOUT": "2"}
    text = train(tmp_path, steps=[1, 2], env=env)
    assert text.count("warning: ") == 1
    assert "W&B does not answer" in text
    assert "tracking.wandb_mode=offline" in text
    [directory] = directories(tmp_path)
    assert logged_steps(directory) == [1, 2]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_online_without_account_is_one_warning(tmp_path: Path) -> None:
    text = train(tmp_path, steps=[1, 2], overrides=("tracking.wandb_mode=online",), env={"WANDB_BASE_URL": NOWHERE})
    assert text.count("warning: W&B gets no more metrics") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("env", "machine", "expected"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": KEY}, None, True),
        ({}, "127.0.0.1:9", True),
        ({}, "elsewhere.example", False),
    ],
    ids=["nothing", "key", "netrc", "netrc of another server"],
)
def test_logged_in(tmp_path: Path, env: dict[str, str], machine: str | None, expected: bool) -> None:
    if machine:
        (tmp_path / ".netrc").write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
        (tmp_path / ".netrc").chmod(0o600)
    program = "from titan_exp.tracking.sinks import logged_in; print(logged_in())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(tmp_path, WANDB_BASE_URL=NOWHERE, **env),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(expected)
    assert done.stderr == ""
