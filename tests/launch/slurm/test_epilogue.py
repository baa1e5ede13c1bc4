"""Blamed rank and requeues of an ended SLURM attempt, from rank records and the log of a real srun (22.05)."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.test_rank_main import make_run
from titan_exp.launch.rank.rank_env import TOKEN, RankError, RankRecord, write_record
from titan_exp.launch.slurm import epilogue
from titan_exp.launch.slurm.squeue import parse_srun_log
from titan_exp.tracking.run_folder.run_folder import RunFolder

GLOO = RankError(
    "RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", "tb", False
)
VALUE = RankError("ValueError", "the loss went for a walk", "tb", False)
USER = RankError("UserError", "data.paths: no such folder.", "tb", True)
START = "titan_exp: job 12, start 0 on node[1-2], 2026-11-22T18:22:31\n"
TERMINATING = "srun: launch/slurm: _step_signal: Terminating StepId=12.0\n"
CANCELLED = "slurmstepd-node1: error: *** STEP 12.0 ON node1 CANCELLED AT 2026-11-22T18:22:31 ***\n"
KILLED_FIRST = f"{START}srun: error: node1: task 1: Killed\n{TERMINATING}{CANCELLED}"
KILLED_AFTER = (
    f"{START}srun: error: node1: task 0: Exited with exit code 1\n{TERMINATING}srun: error: node1: task 1: Killed\n"
    "srun: error: node2: tasks 2-3: Exited with exit code 1\nsrun: Force Terminated StepId=12.0\n"
)
PEERS_KILLED = (
    f"{START}srun: error: node1: task 1: Exited with exit code 1\n{TERMINATING}{CANCELLED}"
    "srun: error: node1: task 0: Killed\nsrun: error: node2: tasks 2-3: Killed\n"
)
OOM = (
    f"{START}slurmstepd-node1: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of your processes may have "
    "been killed by the cgroup out-of-memory handler.\nsrun: error: node1: task 1: Out Of Memory\n"
    f"{TERMINATING}{CANCELLED}srun: error: node2: tasks 2-3: Killed\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Run of four ranks whose job 12 has ended."""
    monkeypatch.setenv(TOKEN, "feedbeefcafe")
    folder = make_run(tmp_path, "parallelism.dp_shard=4", "cluster=slurm", "cluster.device=cpu")
    folder.add_attempt(world_size=4, hosts=(), token="feedbeefcafe", job_id="12", launched_by="slurm")
    folder.update_attempt(1, start=1.0, checkpoint=0)
    return folder


def close(folder: RunFolder, log: str, *ends: RankError | str | None, code: int = 1) -> str:
    """Close the attempt; each rank's end is its error, the signal it got, or None if killed. Returns the reason."""
    for rank, end in enumerate(ends):
        record = RankRecord(rank, 100 + rank, "node1", 1.0)
        if isinstance(end, RankError):
            record = replace(record, end=10.0 - rank, exit=2 if end.user else 1, error=end)
        write_record(folder, 1, replace(record, signal=end) if isinstance(end, str) else record)
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "slurm-12.out").write_text(log)
    assert epilogue.main([str(folder.path), "12", "137"]) == code
    return folder.read_attempts()[0].reason or ""


@pytest.mark.parametrize("log", [KILLED_FIRST, KILLED_AFTER, START], ids=["first", "after", "no words of srun"])
def test_killed_rank_is_blamed_before_broken_collectives(folder: RunFolder, log: str):
    reason = close(folder, log, GLOO, None, GLOO, GLOO)
    assert reason.startswith("a signal killed rank 1. If nobody sent it, host memory ran out")
    assert "cluster.memory_gb" in reason


def test_out_of_memory_kill_says_so(folder: RunFolder):
    reason = close(folder, OOM, GLOO, None, "SIGTERM", GLOO)
    assert reason.startswith(
        "the machine or the job ran out of host memory, so the system killed rank 1: ask for more with "
    )
    assert reason.endswith("(srun: Out Of Memory)")


@pytest.mark.parametrize(("error", "code"), [(VALUE, 1), (USER, 2)])
def test_raising_rank_is_blamed_before_peers_that_srun_kills(folder: RunFolder, error: RankError, code: int):
    folder.request_stop("rank 0 received SIGTERM")
    # Rank 0 hangs in native code, so that it records no signal.
    reason = close(folder, PEERS_KILLED, None, error, "SIGTERM", GLOO, code=code)
    assert reason == f"rank 1: {error.type}: {error.message}"


def test_broken_collective_is_blamed_if_no_rank_was_killed(folder: RunFolder):
    folder.request_stop("rank 0 received SIGTERM")
    assert close(folder, PEERS_KILLED, "SIGTERM", GLOO, "SIGTERM", "SIGTERM").startswith("rank 1: RuntimeError: [/pyt")


def test_native_crash(folder: RunFolder):
    log = KILLED_FIRST.replace("task 1: Killed", "task 1: Segmentation fault (core dumped)")
    reason = "rank 1 ended without a traceback (srun: Segmentation fault (core dumped))"
    assert close(folder, log, GLOO, None, GLOO, GLOO) == reason


def test_cancelled_step(folder: RunFolder):
    killed = "srun: error: node2: task 1: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=15.0\n"
    aborted = f"{START}srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
    assert close(folder, aborted + killed) == "SLURM ended the job step, because of scancel or because a node failed"


def test_step_over_its_memory_limit(folder: RunFolder):
    limit = "slurmstepd: error: StepId=12.0 exceeded memory limit (3072 > 2048), being killed\n"
    reason = close(folder, f"{START}{limit}srun: Job step aborted: Waiting up to 7 seconds.\n")
    assert reason.startswith("the job step ran out of host memory, so SLURM ended it: ask for more with cluster.mem")


def test_killed_srun(folder: RunFolder):
    reason = close(folder, START, None, None, None, None)
    assert reason == "a signal ended srun (Killed), and the ranks with it"


def test_out_of_memory_before_the_start(folder: RunFolder):
    folder.update_attempt(1, start=None)
    reason = close(folder, OOM, code=137)
    assert reason.startswith(
        "no rank started (srun: rank 1: Out Of Memory), since host memory ran out: ask for more with "
    )


def test_earlier_start_of_the_job_is_ignored(folder: RunFolder):
    log = OOM + KILLED_FIRST.replace("task 1", "task 3")
    reason = close(folder, log, GLOO, GLOO, GLOO, None)
    assert reason.startswith("a signal killed rank 3")


def test_list_of_tasks():
    log = parse_srun_log("srun: error: node1: tasks 0,2-3: Killed\nsrun: error: node2: task 7: Terminated\n")
    assert [(task.rank, task.message, task.first) for task in log.exits] == [(n, "Killed", True) for n in (0, 2, 3)]


def test_requeues_are_counted_without_progress(folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    """20 requeues are the default; with a new checkpoint the count begins anew."""
    folder.update_attempt(1, requeues=20)
    folder.request_stop("time limit")
    (folder.checkpoints / "step-00000003").mkdir(parents=True)
    close(folder, START, None, None, None, None, code=85)
    assert folder.read_attempts()[-1].requeues == 0
    folder.update_attempt(2, start=2.0, checkpoint=3, requeues=20)
    assert epilogue.main([str(folder.path), "12", "137"]) == 1
    said = capsys.readouterr().out
    why = (
        "time limit, and killed before all ranks had saved, not requeued: 21 attempts in a row wrote no new checkpoint"
    )
    assert f"{why} (cluster.max_requeues=20)" in (folder.read_attempts()[-1].reason or "")
    assert "not requeued: 21 attempts" in said
    assert len(folder.read_attempts()) == 2


def test_deleted_and_replaced_folder(folder: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder.add_attempt(world_size=4, hosts=(), token="0123456789ab", launched_by="slurm")
    before = folder.attempts.read_text()
    assert epilogue.main([str(folder.path), "12", "0"]) == 1
    assert "started this run anew meanwhile, so job 12 ends" in capsys.readouterr().out
    assert folder.attempts.read_text() == before
    assert epilogue.main([str(tmp_path / "gone"), "12", "0"]) == 1
    assert "somebody deleted or moved the run folder, so job 12 ends" in capsys.readouterr().out
    assert not (tmp_path / "gone").exists()
