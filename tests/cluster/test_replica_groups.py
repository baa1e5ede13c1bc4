"""Replica groups as jobs of a real SLURM: each requeued alone while the others train on."""

import json
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.cluster import submitting
from tests.cluster.submitting import Submitting, ends, last
from tests.parity.runs import PARAGRAPHS, SMALL
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import tensor_shapes
from titan_exp.extensions.replica_groups.events import read_events, summarize_groups
from titan_exp.extensions.replica_groups.lighthouse import TORCHFT, torchft_version
from titan_exp.launch.local.executor import run
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


@pytest.fixture(autouse=True)
def paced(stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups train at a pace, unless a test chooses another stand-in; a busy machine has minutes for all steps."""
    stand_in("train_at_a_pace")
    monkeypatch.setattr(submitting, "LIMIT", 240.0)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one device, never stopped."""
    here = Submitting(None, tmp_path_factory.mktemp("undisturbed"))  # type: ignore[arg-type]
    plan = here.plan(*ONE)
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


def test_groups_are_tasks_of_one_array(cluster: Submitting, stand_in: Callable[[str], None]):
    stand_in("succeed")
    folder, job = cluster.submitted(*TWO)
    cluster.ended(folder, "done")
    cluster.wait_until(lambda: not cluster.slurm.queue(), cluster.slurm.state)
    assert ends(folder) == [0]
    assert {event["job_id"] for event in events(folder, "started")} <= {f"{job}_0", f"{job}_1"}
    assert events(folder, "ended")[0]["exit"] == 0


@pytest.mark.night
def test_ranks_end_with_their_group_at_once(cluster: Submitting, stand_in: Callable[[str], None]):
    """Rank 0 ends by SIGTERM, which srun sends, and not by SIGKILL, up to half a minute later."""
    stand_in("killed_beside_a_sleeper")
    two_nodes = ["parallelism.dp_shard=2", "cluster.processes_per_node=1"]
    folder, job = cluster.submitted(*TWO, *two_nodes, "cluster.max_requeues=0")
    reason = cluster.ended(folder, "failed") or ""
    assert reason.startswith("replica group ")
    assert "a signal killed rank 1" in reason
    assert ends(folder) == [1]
    assert sorted(event["group"] for event in events(folder, "ended")) == [0, 1]
    for group in (0, 1):
        assert "Exited with exit code 143" in (folder.logs / f"slurm-{job}_{group}.out").read_text()


@pytest.mark.night
def test_a_requeued_group_comes_back_alone(cluster: Submitting, expected: list[float]):
    folder, job = cluster.submitted(*TWO)
    assert cluster.submit(cluster.plan(*TWO))[0].outcome in ("queued", "running")
    together = wait_for_groups(cluster, folder, [0, 1])
    cluster.slurm.run("scontrol", "requeue", f"{job}_1")
    alone = wait_for_groups(cluster, folder, [0], after=together["time"])
    assert alone["time"] - together["time"] < 30
    again = wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    # As before the end of its time, to the group that leads.
    cluster.slurm.run("scancel", "--batch", "--signal=USR2", f"{job}_0")
    alone = wait_for_groups(cluster, folder, [1], after=again["time"])
    wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    cluster.ended(folder, "done")
    assert ends(folder) == [0]
    assert [event["group"] for event in events(folder, "leaves")] == [0]
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert steps(folder) == list(range(1, STEPS + 1))


@pytest.mark.night
def test_a_requeued_group_comes_back_to_semi_synchronous_training(cluster: Submitting):
    """The other group trains its rounds on without it, and no step is lost, repeated in a row, or counted otherwise."""
    last_step, interval = 200, 10
    words = [word for word in TWO if not word.startswith("data")]  # all tokens of rows are predicted
    words += ["semi_sync=diloco", f"semi_sync.interval={interval}", f"training.steps={last_step}"]
    folder, job = cluster.submitted(*words)
    together = wait_for_groups(cluster, folder, [0, 1])
    cluster.wait_until(lambda: len(steps(folder)) >= interval, lambda: cluster.story(folder))
    cluster.slurm.run("scontrol", "requeue", f"{job}_1")
    alone = wait_for_groups(cluster, folder, [0], after=together["time"])
    again = wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    cluster.ended(folder, "done")
    assert ends(folder) == [0]
    assert steps(folder) == list(range(1, last_step + 1))
    rows = read_metrics(folder.metrics)
    alive = [row["participants"] for row in rows]
    assert alive[:interval] == [2] * interval
    assert 1 in alive, "the other trained on"
    assert alive[-1] == 2
    assert alone["step"] < again["step"]
    assert len({row["tokens"] - row["step"] * (rows[0]["tokens"]) for row in rows}) == 1  # type: ignore[operator]
    shapes = tensor_shapes(CheckpointFolder(folder.checkpoints).path_of(last_step))
    assert len({key.split(".")[1] for key in shapes if key.startswith("group.")}) == 1, "and the writer's"


@pytest.mark.night
def test_lighthouse_and_its_group_are_killed(cluster: Submitting, expected: list[float]):
    folder, _ = cluster.submitted(*TWO)
    together = wait_for_groups(cluster, folder, [0, 1])
    first = events(folder, "lighthouse started")[-1]
    (agent,) = lighthouses(folder, first["group"])
    agent.kill()
    cluster.wait_until(lambda: len(events(folder, "lighthouse started")) > 1, lambda: cluster.story(folder))
    at = steps(folder)[-1]
    cluster.wait_until(lambda: steps(folder)[-1] > at + 5, lambda: cluster.story(folder))
    group = events(folder, "lighthouse started")[-1]["group"]
    killed = kill_rank(folder, group)
    alone = wait_for_groups(cluster, folder, [1 - group], after=together["time"])
    cluster.wait_until(lambda: bool(events(folder, "ended")), lambda: cluster.story(folder))
    (ended,) = events(folder, "ended")
    assert (ended["group"], ended["exit"]) == (group, 1)
    assert ended["reason"].startswith("a signal killed rank 0")
    assert ended["time"] - killed < 10
    wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    cluster.ended(folder, "done")
    assert ends(folder) == [0]
    assert events(folder, "lighthouse started")[-1]["group"] == 1 - group
    assert losses(folder) == pytest.approx(expected, rel=1e-5)
    assert steps(folder) == list(range(1, STEPS + 1))
    summary = summarize_groups(folder)
    assert summary is not None
    assert summary.groups == 2
    assert summary.heals >= 1


@pytest.mark.night
def test_a_dead_fleet_is_submitted_again(cluster: Submitting, expected: list[float]):
    folder, job = cluster.submitted(*TWO)
    wait_for_groups(cluster, folder, [0, 1])
    cluster.wait_until(lambda: steps(folder)[-1] > 110, lambda: cluster.story(folder))
    for group in (0, 1):
        kill_rank(folder, group)
    reason = cluster.ended(folder, "failed") or ""
    assert reason.startswith("replica group ")
    assert ends(folder) == [1]
    _, again = cluster.submitted(*TWO)
    assert again != job
    cluster.ended(folder, "done")
    assert ends(folder) == [1, 0]
    assert last(folder).checkpoint == 100
    assert losses(folder) == pytest.approx(expected, rel=1e-5)


@pytest.mark.night
def test_only_missing_groups_are_submitted_and_all_are_cancelled(cluster: Submitting):
    folder, job = cluster.submitted(*TWO, "training.steps=100000", "cluster.requeue=never")
    wait_for_groups(cluster, folder, [0, 1])
    kill_rank(folder, 1)
    alone = wait_for_groups(cluster, folder, [0], after=events(folder, "quorum")[-1]["time"])
    cluster.wait_until(lambda: bool(events(folder, "stays away")), lambda: cluster.story(folder))
    cluster.wait_until(lambda: [*cluster.slurm.queue()] == [f"{job}_0"], cluster.slurm.state)
    (submission,) = cluster.submit(cluster.plan(*TWO, "training.steps=100000", "cluster.requeue=never"))
    assert (submission.outcome, submission.reason) == ("submitted", "only groups 1, which had no job")
    wait_for_groups(cluster, folder, [0, 1], after=alone["time"])
    assert len(ends(folder)) == 1
    (again,) = cluster.submit(cluster.plan(*TWO, "training.steps=100000", "cluster.requeue=never"))
    assert (again.outcome, again.job_id) == ("running", f"{job},{submission.job_id}")
    said = cluster.backend.cancel([folder], reason="changed my mind")[folder.path]
    assert said.count("asked to save and stop") == 2
    assert (cluster.ended(folder, "preempted") or "").startswith("cancelled: changed my mind")
    assert ends(folder) == [85]
    assert cluster.slurm.queue() == {}


def lighthouses(folder: RunFolder, group: int) -> list[psutil.Process]:
    """Agent of a group's newest start."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if (
            "titan_exp.extensions.replica_groups.agents" in words
            and str(folder.path) in words
            and words[-3] == str(group)
        ):
            found.append(process)
    return found


def kill_rank(folder: RunFolder, group: int) -> float:
    """`kill -9` of rank 0 of a group's newest start; returns the time."""
    attempt = last(folder).attempt
    (logs, *_) = [name for name in reversed(folder.world_logs(attempt)) if name.startswith(f"group-{group:02d}")]
    record = json.loads((folder.attempt_logs(attempt) / logs / "rank-00000.json").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    return time.time()
