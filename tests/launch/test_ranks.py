"""Real ranks through submitit: environment, and the end of all ranks after a failure."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.composing import experiment, give_gpus
from tests.launch.launching import Launch, launch, ranks_of, seen
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.launch import attempt_end
from titan_exp.launch.local.ranks import LocalRanks
from titan_exp.launch.rank.rank_env import (
    VISIBLE_GPUS,
    RankError,
    RankRecord,
    rank_environment,
    read_record,
    write_record,
)
from titan_exp.tracking.run_folder.run_folder import WORLD, RunFolder, World

KERNEL_COUNTER = pytest.mark.xdist_group("kills of the machine")
"""One after the other: the kernel counts out-of-memory kills of the whole machine."""


def test_rank_environment_of_ranks(tmp_path: Path) -> None:
    # Typed in a shell of torchrun, and from within a rank of another run.
    outer = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "TITAN_EXP_ATTEMPT": "7"}
    outer |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TITAN_EXP_WORLD": '{"number": 1}'}
    run = Launch(tmp_path, "succeed", "parallelism.dp_shard=2", CUDA_VISIBLE_DEVICES="GPU-1234,3", **outer)
    code, _, err = run.finish()
    assert (code, err) == (0, "")
    for rank in (0, 1):
        report = seen(run.folder, rank)
        env = report["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert [env[name] for name in outer if name in env and "RANK" not in name] == ["2", None, None, None]
        assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert report["rendezvous_folder"] is True
        assert not Path(env["TITAN_EXP_RENDEZVOUS"]).parent.exists()  # removed at the end
        # Packages beside where the command was typed can be imported.
        assert report["cwd"] == str(tmp_path)
        assert str(tmp_path) in report["path"]
        assert report["handlers"]["SIGINT"] == "1"  # ignored: Ctrl-C is the launcher's
        assert "request_stop" in report["handlers"]["SIGTERM"]
        assert "request_stop" in report["handlers"]["SIGUSR2"]
        record = read_record(run.folder, 1, rank)
        assert record is not None
        assert (record.exit, record.error) == (0, None)
        assert f"hello from rank {rank}" in (run.folder.logs / f"attempt-001/rank-0000{rank}.log").read_text()
    assert ranks_of(tmp_path) == []
    # Whoever may write to the run folder could replace a pickle before a rank reads it.
    assert list(run.folder.path.rglob("*.pkl")) == []


def test_threads_and_gpus_are_as_configured(tmp_path: Path) -> None:
    run = Launch(tmp_path, "succeed", "cluster.threads_per_process=3", "cluster.device=cpu", CUDA_VISIBLE_DEVICES="0")
    assert run.finish()[0] == 0
    env = seen(run.folder, 0)["env"]
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("mask", "words", "shown"),
    [
        (None, [], ["0,1", "2,3"]),
        ("5, GPU-8f1,7,2", [], ["5,GPU-8f1", "7,2"]),
        ("5,6,7,99,2", [], ["5,6", "7"]),  # CUDA stops at an unknown one
        (None, ["cluster.device=cpu"], ["", ""]),
    ],
)
def test_each_of_several_worlds_has_gpus_of_its_own(tmp_path, monkeypatch, mask, words, shown):
    give_gpus(monkeypatch, 8)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    cluster = experiment(*words).cluster
    found = [rank_environment(cluster, 2, 1, tmp_path, world=World(number, 0)) for number in (0, 1)]
    assert [each[VISIBLE_GPUS] for each in found] == shown
    alone = rank_environment(cluster, 2, 1, tmp_path)
    assert alone[VISIBLE_GPUS] == ("" if words else mask)
    assert found[0].keys() - alone.keys() == {WORLD}


def test_idle_threads_spin_for_a_moment_unless_the_user_says_how_they_wait(tmp_path, monkeypatch):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    cluster = experiment("cluster.device=cpu").cluster
    for given in (None, *names):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(given, "7")
        found = rank_environment(cluster, 1, 1, tmp_path)
        assert {name: found.get(name) for name in names} == (
            {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"} if given is None else dict.fromkeys(names)
        )


def test_output_of_rank_0_and_metrics_are_shown(tmp_path: Path) -> None:
    words = ["parallelism.dp_shard=2", "training.steps=2"]
    code, out, _ = launch(tmp_path, "succeed", *words, PYTHONIOENCODING="latin-1")
    assert code == 0
    assert "hello from rank 0 ? its log" in out
    (log,) = tmp_path.rglob("rank-00000.log")
    assert "hello from rank 0 → its log" in log.read_text(encoding="utf-8")
    assert "hello from rank 1" not in out
    assert "step 1/2" in out
    assert "step 2/2" in out
    last = out.splitlines()[-1]
    assert "done after step 2 of 2, loss 1.5000, 200 tokens/s" in last
    assert str(tmp_path / "x") in last


def test_failed_rank_ends_all_with_its_traceback(tmp_path: Path) -> None:
    run = Launch(tmp_path, "raise_on_rank_1", "parallelism.dp_shard=2")
    code, _, err = run.finish()
    assert code == 1
    assert 'raise ValueError("the loss went for a walk")' in err
    assert err.rstrip().endswith("rank 1: ValueError: the loss went for a walk")
    assert "titan_exp/launch" not in err
    assert ranks_of(tmp_path) == []
    state = run.folder.read_state()
    assert state is not None
    assert (state.state, state.reason) == ("failed", "rank 1: ValueError: the loss went for a walk")
    (row,) = run.folder.read_attempts()
    assert (row.exit, row.reason, row.world_size) == (1, state.reason, 2)
    assert row.job_id is not None
    assert row.start is not None
    assert row.end is not None
    assert row.intent <= row.start <= row.end


def test_first_failure_is_the_cause(tmp_path: Path) -> None:
    code, out, err = launch(
        tmp_path,
        "raise_everywhere_after_rank_1",
        "parallelism.dp_shard=3",
        "training.global_batch_size=12",
    )
    assert code == 1
    assert "ValueError: the cause" in err
    assert "ConnectionError" not in err + out  # rank 0's own traceback is in its log only


@KERNEL_COUNTER
def test_killed_rank_is_reported(tmp_path: Path) -> None:
    run = Launch(tmp_path, "killed_on_rank_1", "parallelism.dp_shard=2")
    code, _, err = run.finish()
    assert code == 1
    assert "a signal killed rank 1" in err
    assert "memory" in err
    assert "about to allocate a lot" in err  # the end of its log
    assert ranks_of(tmp_path) == []
    state = run.folder.read_state()
    assert state is not None
    assert state.state == "failed"


def test_a_rank_that_nobody_saw_alive_has_ended(tmp_path: Path) -> None:
    """Killed between two looks at the controller's children, it left its record alone."""
    layout, folder = ResolvedLayout.of(experiment("parallelism.dp_shard=2")), RunFolder(tmp_path)
    ranks = LocalRanks(layout, folder, 1)
    gone = subprocess.Popen(["true"])
    write_record(folder, 1, RankRecord(0, os.getpid(), "here", time.time()))
    write_record(folder, 1, RankRecord(1, gone.pid, "here", time.time()))
    gone.wait()
    ranks._update(0, over=False)
    ranks._update(1, over=False)
    assert [failure.rank for failure in ranks._failures.values()] == [1]


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """Control group with 256 MiB of memory."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"titan_exp-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(2**28))
                yield group
                return
            finally:
                group.rmdir()
    pytest.skip("no control group of memory can be created here")


@KERNEL_COUNTER
def test_out_of_memory_kill_says_so(tmp_path: Path, memory_cgroup: Path) -> None:
    """By the kernel's own kill."""
    run = Launch(tmp_path, "out_of_memory_on_rank_1", "parallelism.dp_shard=2", MEMORY_CGROUP=str(memory_cgroup))
    assert run.finish()[0] == 1
    reason = run.folder.read_attempts()[0].reason or ""
    assert reason.startswith(
        "the machine or the job ran out of host memory, so the system killed rank 1: let it need less"
    )


def test_broken_collective_is_never_the_cause_beside_a_killed_rank(tmp_path: Path) -> None:
    """Clocks of machines differ, so its time may be the earlier."""
    error = RankError("RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "", user=False)
    broken = attempt_end.failure_from_error(RankRecord(0, 1, "node1", 1.0, end=2.0, exit=1, error=error))
    killed = attempt_end.failure_from_signal(1, 3.0, tmp_path / "log")
    assert (attempt_end.failed([broken, killed]).reason or "").startswith("a signal killed rank 1")
    assert (attempt_end.failed([broken]).reason or "").startswith("rank 0: RuntimeError")


def test_any_other_exit_code_is_a_failure(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, "exit_7")
    assert code == 1
    assert "exit code 7" in err


def test_user_error_has_no_traceback(tmp_path: Path) -> None:
    run = Launch(tmp_path, "user_error")
    code, _, err = run.finish()
    assert (code, err) == (2, "data.paths: no such folder. Give one that exists.\n")
    assert "UserError" in (run.folder.read_attempts()[0].reason or "")


def test_a_rank_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    code, _, err = launch(tmp_path, "no_such_function")
    assert code == 1
    assert "no_such_function" in err


def test_killed_controller_ends_the_ranks(tmp_path: Path) -> None:
    run = Launch(tmp_path, "wait_for_ever", "parallelism.dp_shard=2")
    folder = run.wait_for("seen-0.json", "seen-1.json")
    (controller,) = (process for process in ranks_of(tmp_path) if "_local" in " ".join(process.cmdline()))
    controller.kill()
    code, _, err = run.finish()
    assert code == 1
    assert "controller" in err
    assert ranks_of(tmp_path) == []
    state = folder.read_state()
    assert state is not None
    assert state.state == "failed"
