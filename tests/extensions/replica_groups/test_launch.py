"""The launcher of replica groups, with real ranks under SIGKILL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from tests.launch.launching import Launch, launch_environment, ranks_of, wait_until
from tests.parity.runs import PARAGRAPHS, SMALL
from titan_exp.extensions.replica_groups.events import read_events
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

STEPS = 100
# With a small learning rate, rounding stays rounding over a hundred steps.
SETTINGS = [
    *(setting for setting in SMALL if not setting.startswith(("training.steps", "optimizer.lr", "checkpoint"))),
    *PARAGRAPHS,
    f"training.steps={STEPS}",
    "training.micro_batch_size=1",
    "optimizer.lr=1e-5",
    "checkpoint.every=25",
    "cluster.group_heartbeat_seconds=1",
]
pytestmark = [
    pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}"),
    pytest.mark.timeout(600),
]


@contextlib.contextmanager
def training(runs: Path, name: str, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    command = [sys.executable, "-m", "titan_exp", "train", *SETTINGS, f"paths.runs={runs}", f"experiment.name={name}"]
    environment = launch_environment("succeed")
    del environment["TITAN_EXP_RANK_MAIN"]  # the real trainer
    process = subprocess.Popen(
        [*command, *overrides], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_until(lambda: any((runs / name).glob("*/attempts.jsonl")))
        yield process, RunFolder(next((runs / name).glob("*/attempts.jsonl")).parent)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out


def wait_for_step(folder: RunFolder, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] == step for row in read_metrics(folder.metrics)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_rank(folder: RunFolder, group: int, rank: int) -> None:
    (logs, *_) = [name for name in reversed(folder.world_logs(1)) if name.startswith(f"group-{group:02d}")]
    record = json.loads((folder.attempt_logs(1) / logs / f"rank-{rank:05d}.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)


def losses(folder: RunFolder) -> list[float]:
    return [float(row["loss"] or 0) for row in read_metrics(folder.metrics)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    @cache
    def run(device: str) -> list[float]:
        words = ["parallelism.dp_shard=1", f"cluster.device={device}"]
        with training(tmp_path_factory.mktemp("runs"), "one", *words) as (process, folder):
            finish(process)
            return losses(folder)

    return run


FOUR_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA GPUs")


@pytest.mark.night
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, FOUR_GPUS])])
def test_ranks_and_lighthouse_are_killed(tmp_path, expected, device):
    words = ["cluster.replica_groups=2", "parallelism.dp_shard=2", f"cluster.device={device}"]
    with training(tmp_path, "two", *words) as (process, folder):
        wait_for_step(folder, 5)
        killed = time.time()
        kill_rank(folder, 0, 1)
        wait_for_step(folder, 15)
        children = psutil.Process(process.pid).children()
        (lighthouse,) = [
            child for child in children if "titan_exp.extensions.replica_groups.lighthouse" in child.cmdline()
        ]
        lighthouse.kill()
        finish(process)
    assert losses(folder) == pytest.approx(expected(device), rel=1e-5)
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    events = read_events(folder)
    (ended,) = [event for event in events if event["event"] == "ended" and event["exit"] != 0]
    assert ended["group"] == 0
    assert ended["time"] - killed < 10
    assert [event["group"] for event in events if event["event"] == "started"] == [0, 1, 0]
    assert any(event["event"] == "lighthouse started" for event in events)
    status = [sys.executable, "-m", "titan_exp", "status", "--json", f"paths.runs={tmp_path}"]
    (row,) = json.loads(subprocess.check_output(status, text=True))
    assert row["state"] == "done"
    assert row["groups"]["heals"] >= 1
    assert row["groups"]["stall"] > 0
    assert row["groups"]["groups"] == 2


@pytest.mark.night
def test_a_dead_fleet_continues_from_its_checkpoint_in_another_shape(tmp_path, expected):
    with training(tmp_path, "two", "cluster.replica_groups=2") as (process, folder):
        wait_for_step(folder, 30)
        for group in (0, 1):
            kill_rank(folder, group, 0)
        process.communicate(timeout=60)
        assert process.returncode == 1
    state = folder.read_state()
    assert state is not None
    assert state.state == "failed"
    with training(tmp_path, "two", "cluster.replica_groups=3") as (process, again):
        finish(process)
    assert again.path == folder.path
    assert losses(folder) == pytest.approx(expected("cpu"), rel=1e-5)


@pytest.mark.night
def test_a_killed_semi_synchronous_group_costs_the_other_no_step(tmp_path):
    words = ["cluster.replica_groups=2", "semi_sync=diloco", "semi_sync.interval=5", "training.steps=200"]
    with training(tmp_path, "diloco", *words) as (process, folder):
        wait_for_step(folder, 10)
        kill_rank(folder, 1, 0)
        finish(process)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 201))
    assert [row["participants"] for row in rows[:10]] == [2] * 10
    assert 1 in {row["participants"] for row in rows}
    assert {row["attempt"] for row in rows} == {1}
    (ended,) = [event for event in read_events(folder) if event["event"] == "ended" and event["exit"] != 0]
    assert ended["group"] == 1


def test_an_orphaned_group_that_has_not_trained_leaves(tmp_path: Path) -> None:
    """It would wait for a state of the other groups, which stop, and hold the run against the same command."""
    run = Launch(tmp_path, "wait_for_ever", "cluster.replica_groups=2", "training.global_batch_size=8")
    run.wait_for("seen-0.json")
    run.process.kill()
    wait_until(lambda: not ranks_of(tmp_path), limit=25)
    run.finish()
