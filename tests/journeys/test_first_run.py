"""What a new user does in the first minutes, and gets wrong."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.journeys.command import TITAN_EXP, titan_exp
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

TINY = [
    "model=llama_debug",
    "training.seq_len=64",
    "training.global_batch_size=4",
    "evaluation.every=0",
    "tracking.log_every=1",
    "cluster.device=cpu",
]
STEPS = 40
LONG = [*TINY, "training.steps=2000", "checkpoint.every=20"]
"""Far longer than a test waits."""


def only_run(folder: Path) -> RunFolder:
    (path,) = (folder / "runs" / "first").iterdir()
    return RunFolder(path)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command whose output goes to `out` in the folder."""
    with (folder / "out").open("a") as out:
        return subprocess.Popen([*TITAN_EXP, *words], cwd=folder, stdout=out, stderr=out, text=True)


def wait_for_row(folder: Path, step: int, limit: float = 60.0) -> None:
    """Wait until the run has logged a step."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        found = list((folder / "runs").glob("first/*/metrics.jsonl"))
        if found and any((row["step"] or 0) >= step for row in read_metrics(found[0])):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not logged in {limit} s:\n{(folder / 'out').read_text()}")


def test_a_run_leaves_a_folder_that_tells_everything(tmp_path):
    done = titan_exp("train", *TINY, f"training.steps={STEPS}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path)
    assert str(folder.path) in done.stdout
    assert json.loads(folder.state.read_text())["state"] == "done"
    assert [row["step"] for row in read_metrics(folder.metrics)] == list(range(1, STEPS + 1))
    for entry in ("config.yaml", "overrides.yaml", "code.json", "env.json", "attempts.jsonl", "loss.png"):
        assert (folder.path / entry).stat().st_size > 0, entry
    assert (folder.checkpoints / f"step-{STEPS:08d}").is_dir()
    assert f"training.steps={STEPS}" in folder.overrides.read_text()

    (folder.path / "loss.png").unlink()
    (folder.path / "loss.png").mkdir()  # stands in for the run of another user, where nothing can be drawn
    again = titan_exp("train", *TINY, f"training.steps={STEPS}", "tracking.log_every=2", folder=tmp_path)
    assert again.returncode == 0
    assert "nothing starts" in again.stdout
    assert "loss.png" in again.stderr
    assert len(folder.read_attempts()) == 1

    text = titan_exp("generate", "prompt=def ", "tokens=20", folder=tmp_path)
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("def ")


@pytest.mark.night
def test_kill_minus_nine_and_the_same_command_again(tmp_path):
    words = ["train", *LONG[:-2], "training.steps=24", "checkpoint.every=5", "parallelism.dp_shard=2"]
    launcher = start(tmp_path, *words)
    wait_for_row(tmp_path, 8)
    # Everything at once, as a machine that loses power.
    for process in [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]:
        process.kill()
    launcher.wait(timeout=10)
    done = titan_exp(*words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(only_run(tmp_path).metrics)
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert {row["attempt"] for row in rows} == {1, 2}

    other = tmp_path / "other"
    other.mkdir()
    assert titan_exp(*words, folder=other).returncode == 0
    undisturbed = read_metrics(only_run(other).metrics)
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]
    assert [row["grad_norm"] for row in rows] == [row["grad_norm"] for row in undisturbed]


@pytest.mark.night
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    launcher = start(tmp_path, "train", *LONG)
    wait_for_row(tmp_path, 5)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    folder = only_run(tmp_path)
    state = json.loads(folder.state.read_text())
    assert state["state"] == "preempted"
    saved = sorted(path.name for path in folder.checkpoints.iterdir())
    assert f"step-{state['step']:08d}" in saved
    assert "Type the same command to continue it" in (tmp_path / "out").read_text()

    launcher = start(tmp_path, "train", *LONG)
    wait_for_row(tmp_path, state["step"] + 1)
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    assert f"continuing after step {state['step']}" in (tmp_path / "out").read_text()


@pytest.mark.night
def test_a_run_is_not_started_twice_at_once(tmp_path):
    launcher = start(tmp_path, "train", *LONG)
    try:
        wait_for_row(tmp_path, 1)
        second = titan_exp("train", *LONG, folder=tmp_path)
        assert second.returncode == 2
        assert "already running" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=60)


@pytest.mark.night
def test_mistakes_are_answered_in_words(tmp_path):
    cases = {
        ("train", "model=llama_debgu"): "llama_debug",
        ("train", "trainig.steps=3"): "training.steps",
        ("train", "training.steps=many"): "training.steps=many",
        ("train", "training.global_batch_size=7", "parallelism.dp_shard=2"): "6 or 8",
        ("train", "parallelism.tp=8"): "parallelism.tp=1",
        ("train", "data=text"): "data.paths",
        ("train", "data=text", "data.paths=[nowhere]"): "nowhere",
        ("train", "cluster.device=cuda"): "cluster.device=cpu",
        ("train", "model.attention_backend=flex", "cluster.device=cpu"): "flash",
        ("trian",): "titan-exp train",
        ("generate",): "titan-exp train",
    }
    for words, expected in cases.items():
        answer = titan_exp(*words, folder=tmp_path)
        assert answer.returncode == 2, (words, answer.stdout, answer.stderr)
        assert expected in answer.stderr, (words, answer.stderr)
        assert "Traceback" not in answer.stderr, words
    assert not (tmp_path / "runs").exists(), "nothing starts"


@pytest.mark.night
def test_a_rank_that_fails_is_heard(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import torch\n\n\nclass Broken(torch.optim.SGD):\n    def step(self, closure=None):\n"
        "        raise ArithmeticError('the step is broken')\n"
    )
    words = ["train", *TINY, "optimizer.name=broken.Broken", "parallelism.dp_shard=2"]
    refused = titan_exp(*words, folder=tmp_path)
    assert (refused.returncode, "broken.py:6, in step" in refused.stderr) == (2, True), "the planned step fails as well"
    assert "Traceback" not in refused.stderr
    failed = titan_exp(*words, "plan.gate=off", folder=tmp_path)
    assert failed.returncode == 1
    assert re.search(r"Traceback.*ArithmeticError: the step is broken", failed.stderr, re.DOTALL)
    state = json.loads(only_run(tmp_path).state.read_text())
    assert state["state"] == "failed"
    assert "the step is broken" in state["reason"]


@pytest.mark.night
def test_a_full_disk_is_said(tmp_path):
    """A small file system of its own; the run cannot begin, or fails, but says why."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", small], check=False, capture_output=True)
    if mounted.returncode:
        import pytest

        pytest.skip("this test needs the right to mount a small file system")
    try:
        words = ["train", *TINY, "training.steps=30", "checkpoint.every=10", f"paths.runs={small}"]
        full = titan_exp(*words, folder=tmp_path)
        assert full.returncode not in (0, 130)
        assert "No space left" in full.stdout + full.stderr
        assert os.listdir(small / "first")
    finally:
        subprocess.run(["umount", "-l", small], check=True)
