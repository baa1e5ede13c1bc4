"""Replica groups as jobs of a real SLURM: each requeued alone while the others train on."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.cluster.submitting import Submitting, ends, last
from tests.parity.runs import PARAGRAPHS, SMALL
from titan_exp.config.machine.torchft import TORCHFT, torchft_version
from titan_exp.launch.local.run import run
from titan_exp.tracking.run_folder.group_events import read_events, summarize_groups
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

STEPS = 400
# With a small learning rate, rounding stays rounding over hundreds of steps.
ONE = [
    *(setting for setting in SMALL if not setting.startswith(("training.steps", "optimizer.lr", "checkpoint"))),
    *PARAGRAPHS,
    f"training.steps={STEPS}",
    "training.micro_batch_size=1",
    "optimizer.lr=1e-6",
    "checkpoint.every=100",
]
TWO = [*ONE, "cluster.replica_groups=2", "cluster.group_heartbeat_seconds=1"]
pytestmark = [
    pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one device, never stopped."""
    submitting = Submitting(None, tmp_path_factory.mktemp("undisturbed"))  # type: ignore[arg-type]
    plan = submitting.plan(*ONE)
    assert run(plan).exit_code == 0
    return losses(plan.folder)


def losses(folder: RunFolder) -> list[float]:
    return [float(row["loss"] or 0) for row in read_metrics(folder.metrics)]


def steps(folder: RunFolder) -> list[int]:
    return [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]


def events(folder: RunFolder, kind: str) -> list[dict]:
    return [event for event in read_events(folder) if event["event"] == kind]


def wait_for_groups(cluster: Submitting, folder: RunFolder, groups: list[int], *, after: float = 0.0) -> dict:
    """Wait until these groups train together."""

    def found() -> list[dict]:
        quorums = events(folder, "quorum")
        return [event for event in quorums[-1:] if sorted(event["groups"]) == groups and event["time"] > after]

    cluster.wait_until(lambda: bool(found()), lambda: cluster.story(folder))
    return found()[0]


@pytest.mark.night
def test_a_requeued_group_comes_back_alone(cluster: Submitting, expected: list[float]):
    folder, job = cluster.submitted(*TWO)
    assert cluster.submit(cluster.plan(*TWO))[0].outcome in ("queued", "running")
    together = wait_for_groups(cluster, folder, [0, 1])
    cluster.slurm.run("scontrol", "requeue", f"{job}_1")
    alone = wait_for_groups(cluster, folder, [0], after=together["time"])
    assert alone["time"] - together["time"] < 30
    wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    cluster.ended(folder, "done")
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert steps(folder) == list(range(1, STEPS + 1))
