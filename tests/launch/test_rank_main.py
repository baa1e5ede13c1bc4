"""Ranks without a launcher: alone, or under torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, launch_environment, seen, wait_until
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.rank.rank_env import FALLBACK_FOLDER, RankRecord, read_record, write_record
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.tracking.run_folder.run_folder import RunFolder


def make_run(runs: Path, *overrides: str) -> RunFolder:
    made = plan_run(to_experiment(compose(["model=llama_debug", f"paths.runs={runs}", *overrides])))
    create_run_folder(made)
    return made.folder


def start(folder: RunFolder, main: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "titan_exp.launch.rank.main", str(folder.path)],
        env=launch_environment(main, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, out, err


def outcome(folder: RunFolder) -> tuple[str, str | None]:
    state = folder.read_state()
    assert state is not None
    return state.state, state.reason


def test_single_process_and_finished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    code, out, err = finish(start(folder, "succeed"))
    assert (code, err) == (0, "")
    assert "hello from rank 0" in out
    assert outcome(folder) == ("done", None)
    (row,) = folder.read_attempts()
    assert (row.exit, row.world_size) == (0, 1)
    assert seen(folder, 0)["env"]["WORLD_SIZE"] == "1"
    code, out, err = finish(start(folder, "succeed"))
    assert (code, err) == (0, "")
    assert "already done" in out
    assert len(folder.read_attempts()) == 1


def test_two_ranks_from_the_environment(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "parallelism.dp_shard=2")
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}
    ranks = [start(folder, "succeed", RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in (1, 0)]
    for process in ranks:
        code, _, err = finish(process)
        assert (code, err) == (0, "")
    assert outcome(folder) == ("done", None)
    assert seen(folder, 1)["env"]["RANK"] == "1"
    for rank in (0, 1):
        record = read_record(folder, 1, rank)
        assert record is not None
        assert record.exit == 0


def test_the_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "parallelism.dp_shard=2")
    code, _, err = finish(start(folder, "succeed"))
    assert code == 2
    assert "torchrun --nproc-per-node 2" in err
    assert folder.read_attempts() == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(start(RunFolder(tmp_path), "succeed"))
    assert code == 2
    assert "config.yaml" in err


def test_failure_is_recorded(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    code, _, err = finish(start(folder, "fail_once"))
    assert code == 1
    assert "RuntimeError: out of luck" in err
    assert outcome(folder) == ("failed", "rank 0: RuntimeError: out of luck")
    assert finish(start(folder, "fail_once"))[0] == 0
    assert outcome(folder) == ("done", None)
    assert [row.exit for row in folder.read_attempts()] == [1, 0]


def test_a_failed_rank_ends_whatever_its_threads_wait_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    code, _, err = finish(start(folder, "fail_while_a_thread_waits"))
    assert code == 1
    assert "RuntimeError: out of luck" in err
    assert outcome(folder) == ("failed", "rank 0: RuntimeError: out of luck")


def test_first_failure_is_not_replaced(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "parallelism.dp_shard=2")
    job = {"WORLD_SIZE": "2", "MASTER_PORT": "29998"}
    main = "raise_everywhere_after_rank_1"
    ranks = [start(folder, main, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in (0, 1)]
    assert [finish(process)[0] for process in ranks] == [1, 1]
    assert outcome(folder) == ("failed", "rank 1: ValueError: the cause")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP])
def test_signal_saves(tmp_path: Path, number: signal.Signals) -> None:
    folder = make_run(tmp_path)
    process = start(folder, "obey_stop")
    wait_until((folder.path / "seen-0.json").exists)
    os.kill(process.pid, number)
    assert finish(process)[0] == 85
    assert outcome(folder) == ("preempted", f"rank 0 received {number.name}")
    assert folder.read_attempts()[0].exit == 85


def test_signal_is_recorded_while_native_code_runs(tmp_path: Path) -> None:
    """It tells ranks that srun ended from the one that was killed before."""
    folder = make_run(tmp_path)
    process = start(folder, "wait_in_native_code")
    try:
        wait_until((folder.path / "native").exists)
        process.terminate()
        wait_until(lambda: (record := read_record(folder, 1, 0)) is not None and record.signal == "SIGTERM")
        assert process.poll() is None
        assert folder.stop_reason() == "rank 0 received SIGTERM"
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def test_a_second_ctrl_c_ends_at_once_and_the_next_start_closes_the_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    process = start(folder, "wait_for_ever")
    wait_until((folder.path / "seen-0.json").exists)
    os.kill(process.pid, signal.SIGINT)
    wait_until(folder.stop_requested)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process)[0] == -signal.SIGINT
    assert finish(start(folder, "succeed"))[0] == 0
    first, second = folder.read_attempts()
    assert "died without a record" in (first.reason or "")
    assert first.end is not None
    assert second.exit == 0


def test_a_rank_reads_its_configuration_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    script = (
        "import os, sys; opened = []\n"
        "sys.addaudithook(lambda event, found: event == 'open' and opened.append(str(found[0])))\n"
        "from titan_exp.launch.rank.main import main\n"
        f"code = main([{str(folder.path)!r}])\n"
        "print(code, sum(path.endswith('config.yaml') for path in opened))"
    )
    environment = launch_environment("read_configuration")
    answer = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=LIMIT, check=False
    )
    assert answer.stdout.splitlines()[-1] == b"0 1", answer.stderr


def test_a_running_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with folder.claim("launcher"):
        code, _, err = finish(start(folder, "succeed"))
    assert code == 2
    assert f"process {os.getpid()}" in err


def test_rank_of_an_older_attempt_exits(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for _ in range(2):
        folder.add_attempt(world_size=1, hosts=["here"])
    late = {f"SUBMITIT_LOCAL_{name}": "0" for name in ("GLOBALID", "LOCALID", "JOB_ID")}
    late |= {"SUBMITIT_LOCAL_NTASKS": "1", "TITAN_EXP_ATTEMPT": "1", "TITAN_EXP_LAUNCHER": "1"}
    script = f"from titan_exp.launch.local.ranks import run_submitit_rank; run_submitit_rank({str(folder.path)!r})"
    environment = launch_environment("succeed", **late)
    answer = subprocess.run([sys.executable, "-c", script], env=environment, timeout=LIMIT, check=False)
    assert answer.returncode == 85
    assert not (folder.path / "seen-0.json").exists()
    assert not folder.stop_requested()


def test_status_goes_to_the_fallback_folder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare = tmp_path / "spare"
    spare.mkdir()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.logs.touch()  # stands in for any reason that the logs cannot be written
    record = RankRecord(3, 1, "here", 1.0, end=2.0, exit=1)
    with pytest.raises(OSError, match="logs"):
        write_record(folder, 1, record)
    monkeypatch.setenv(FALLBACK_FOLDER, str(spare))
    write_record(folder, 1, record)
    assert read_record(folder, 1, 3, spare) == record
