"""Ends of jobs on a real SLURM, and resumption: failures, cancellation, preemption, time limits, failed nodes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cluster.submitting import Submitting, ends, last
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.launch.attempt_end import failure_from_error
from titan_exp.launch.local.executor import run
from titan_exp.launch.rank.rank_env import read_record
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

StandIn = Callable[[str], None]
TWO_NODES = ["parallelism.dp_shard=2", "cluster.processes_per_node=1"]
STEPS = 40
TRAINING = [
    *TWO_NODES,
    f"training.steps={STEPS}",
    "evaluation.every=0",
    "checkpoint.every=1000",
    "cluster.signal_lead=60",
    "cluster.stop_limit=50",
]


@pytest.mark.night
def test_failed_rank_ends_its_peers(cluster: Submitting, stand_in: StandIn):
    stand_in("raise_on_rank_1")
    folder, job = cluster.submitted(*TWO_NODES)
    assert cluster.ended(folder, "failed") == "rank 1: ValueError: the loss went for a walk"
    assert cluster.slurm.job(job)["JobState"] == "FAILED"
    assert cluster.slurm.job(job)["ExitCode"] == "1:0"
    assert ends(folder) == [1]
    assert "the loss went for a walk" in (folder.attempt_logs(1) / "rank-00001.log").read_text()


def test_killed_rank(cluster: Submitting, stand_in: StandIn):
    """The survivor records a broken collective, and its exit may reach srun first."""
    stand_in("killed_in_a_collective")
    folder, job = cluster.submitted(*TWO_NODES)
    reason = cluster.ended(folder, "failed") or ""
    survivor = read_record(folder, 1, 0)
    assert survivor is not None
    assert failure_from_error(survivor).broken_collective
    assert reason.startswith("a signal killed rank 1")
    assert reason.endswith("(srun: Killed)")
    assert cluster.slurm.job(job)["JobState"] == "FAILED"


def test_ranks_that_do_not_start(cluster: Submitting):
    folder, job = cluster.submitted("cluster.setup=['cd /']", "cluster.srun_args=['--chdir=/', '--nonsense']")
    assert "no rank started" in (cluster.ended(folder, "failed") or "")
    assert cluster.slurm.job(job)["JobState"] == "FAILED"


@pytest.mark.night
def test_max_requeues(cluster: Submitting, stand_in: StandIn):
    """Attempts without a new checkpoint count, so not the first."""
    stand_in("stop_always")
    folder, job = cluster.submitted("cluster.max_requeues=0")
    cluster.wait_until(lambda: len(ends(folder)) == 2, lambda: cluster.story(folder))
    # Preempted is what it is after the first start as well.
    cluster.wait_until(lambda: ends(folder) == [85, 85], lambda: cluster.story(folder))
    cluster.ended(folder, "preempted")
    assert [(row.requeues, row.checkpoint) for row in folder.read_attempts()] == [(0, 0), (0, 1)]
    assert "not requeued: 1 attempt in a row wrote no new checkpoint" in (last(folder).reason or "")
    assert [row.restarts for row in folder.read_attempts()] == [0, 1]
    assert cluster.slurm.job(job)["JobState"] == "FAILED"


def test_chained_job_if_requeueing_is_forbidden(cluster: Submitting, stand_in: StandIn):
    stand_in("obey_stop")
    folder, job = cluster.submitted("cluster.requeue=chain")
    cluster.running(folder, "seen-0.json")
    folder.request_stop("a test")
    cluster.ended(folder, "done")
    assert ends(folder) == [85, 0]
    assert last(folder).job_id != job
    assert cluster.slurm.job(job)["ExitCode"] == "85:0"


@pytest.mark.night
def test_ranks_that_do_not_stop_are_killed_and_requeued(cluster: Submitting, stand_in: StandIn):
    stand_in("hang")
    folder, job = cluster.submitted("cluster.stop_limit=1", "cluster.max_requeues=1")
    cluster.running(folder, "hanging")
    cluster.slurm.run("scancel", "--batch", "--signal=USR2", job)
    cluster.wait_until(lambda: len(ends(folder)) == 2, lambda: cluster.story(folder))
    first = folder.read_attempts()[0]
    assert first.exit == 85
    assert "killed before all ranks had saved" in (first.reason or "")
    # The intent is recorded before the requeue, which a cancellation in between would not stop.
    cluster.slurm.wait_until(lambda: cluster.slurm.job(job)["Restarts"] == "1", "the requeued job")
    assert cluster.status(folder).state in ("queued", "running")


def test_cancelling(cluster: Submitting, stand_in: StandIn):
    stand_in("obey_stop")
    waiting, _ = cluster.submitted("cluster.sbatch_args=['--hold']", "experiment.seed=1")
    running, job = cluster.submitted("experiment.seed=2")
    cluster.running(running, "seen-0.json")
    never = cluster.plan("experiment.seed=3").folder
    assert cluster.status(waiting).state == "queued"
    said = cluster.backend.cancel([waiting, running], reason="changed my mind")
    assert "taken out of the queue" in said[waiting.path]
    assert "asked to save and stop" in said[running.path]
    assert (cluster.ended(running, "preempted") or "").startswith("cancelled: changed my mind")
    assert (running.path / "saved-0").exists()
    assert (ends(running), ends(waiting)) == ([85], [None])
    assert cluster.slurm.job(job)["JobState"] == "FAILED"  # it did not do what it was to do
    assert last(waiting).reason == "cancelled: changed my mind"
    assert cluster.status(waiting).state == cluster.status(never).state == "gone"


def test_scancel_by_hand_saves(cluster: Submitting, stand_in: StandIn):
    stand_in("obey_stop")
    folder, job = cluster.submitted(*TWO_NODES)
    cluster.running(folder, "seen-0.json", "seen-1.json")
    cluster.slurm.run("scancel", job)
    assert "received SIGTERM" in (cluster.ended(folder, "preempted") or "")
    assert (folder.path / "saved-0").exists()
    assert (folder.path / "saved-1").exists()
    assert cluster.status(folder).reason == last(folder).reason


@pytest.mark.night
def test_drained_and_failed_nodes(cluster: Submitting, stand_in: StandIn):
    stand_in("obey_stop")
    for node in ("node1", "node2", "node3"):
        cluster.slurm.drain(node)
    folder, job = cluster.submitted(*TWO_NODES)
    cluster.wait_until(lambda: "DRAINED" in (cluster.status(folder).reason or ""), lambda: cluster.story(folder))
    assert cluster.status(folder).state == "queued"
    for node in ("node1", "node2"):
        cluster.slurm.resume(node)
    cluster.running(folder, "seen-0.json", "seen-1.json")
    assert last(folder).job_id == job
    host = last(folder).hosts[0]
    cluster.slurm.drain(host)  # its slurmd is alive and would return it to service, with the old step still on it
    cluster.slurm.fail(host)
    cluster.slurm.resume("node3")

    def started_again() -> bool:
        # The node only pretends to be dead, and a start that meets the old one there is held back.
        if "held" in (cluster.status(folder).reason or ""):
            cluster.slurm.run("scontrol", "release", job)
        return len(ends(folder)) == 2

    cluster.wait_until(started_again, lambda: cluster.story(folder))
    cluster.ended(folder, "done")
    first, second = folder.read_attempts()
    assert first.restarts == 0
    assert (second.restarts or 0) >= 1  # a start that is held back counts for SLURM and never reaches the run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The same training on this machine alone, never stopped."""
    submitting = Submitting(None, tmp_path_factory.mktemp("undisturbed"))  # type: ignore[arg-type]
    folder = submitting.plan(*TRAINING).folder
    assert run(submitting.plan(*TRAINING)).exit_code == 0
    return folder


def test_scontrol_requeue_during_training(cluster: Submitting, undisturbed: RunFolder):
    """`scontrol requeue`, as preemption does it: SIGTERM, a few seconds, SIGKILL. Two nodes, by gloo."""
    folder, job = cluster.submitted(*TRAINING)
    cluster.wait_until(lambda: len(read_metrics(folder.metrics)) > 2, lambda: cluster.story(folder))
    cluster.slurm.run("scontrol", "requeue", job)
    cluster.ended(folder, "done")
    first, second = folder.read_attempts()
    assert (first.exit, second.exit, second.restarts, second.job_id) == (85, 0, 1, job)
    assert first.hosts == ("node1", "node2")
    assert_same(folder, undisturbed)


@pytest.mark.night  # a minute of waiting for SLURM; test_slurm has the warning before a time limit
def test_time_limit_during_training(cluster: Submitting, stand_in: StandIn, undisturbed: RunFolder):
    stand_in("train_slowly")
    folder, job = cluster.submitted(*TRAINING, "cluster.time_limit=600")
    cluster.wait_until(lambda: len(read_metrics(folder.metrics)) > 2, lambda: cluster.story(folder))
    # SLURM looks at limits every half minute; the signal comes a minute before this one.
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.wait_until(lambda: len(ends(folder)) == 2, lambda: cluster.story(folder))
    cluster.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=600")
    cluster.ended(folder, "done")
    first, second = folder.read_attempts()
    assert (first.exit, second.exit, second.restarts) == (85, 0, 1)
    assert "time limit" in (first.reason or "")
    assert_same(folder, undisturbed)


def assert_same(folder: RunFolder, undisturbed: RunFolder) -> None:
    """Bitwise the same numbers and final state, though one was stopped and the other not."""
    numbers = [
        [
            {key: row.get(key) for key in ("step", "loss", "grad_norm", "lr", "tokens")}
            for row in read_metrics(run.metrics)
        ]
        for run in (folder, undisturbed)
    ]
    assert len(numbers[0]) == STEPS
    assert numbers[0] == numbers[1]
    states = [final_state(run.checkpoints) for run in (folder, undisturbed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def final_state(checkpoints: Path) -> dict[str, torch.Tensor]:
    from titan_exp.checkpoint.storage_reader import load_into, tensor_shapes

    path = CheckpointFolder(checkpoints).path_of(STEPS)
    state = {
        key: torch.empty(shape)
        for key, shape in tensor_shapes(path).items()
        if key.startswith(("model.", "optimizer."))
    }
    load_into(path, state)
    return state
