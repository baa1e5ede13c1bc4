"""Runs as a user drives them: signals, kills, and the same command again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.launching import LIMIT, REPOSITORY, Launch, launch, launch_environment, ranks_of, wait_until
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch import attempt_end
from titan_exp.launch.local.executor import run
from titan_exp.launch.run_console import summarize
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

TWO_RANKS = "parallelism.dp_shard=2"
STEPS = "training.steps=600"


def state_of(folder: RunFolder) -> RunState:
    state = folder.read_state()
    assert state is not None
    return state


def test_ctrl_c_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    first = Launch(tmp_path, "obey_stop", TWO_RANKS, STEPS, FAKE_SAVE_SECONDS="0.5")
    folder = first.wait_for("seen-0.json", "seen-1.json")
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does, ranks included
    code, out, err = first.finish()
    assert (code, err) == (130, "")
    assert "Stopping" in out
    assert (folder.path / "saved-0").exists()
    assert (folder.path / "saved-1").exists()
    assert (state_of(folder).state, state_of(folder).step) == ("preempted", 1)
    assert "Ctrl-C" in (state_of(folder).reason or "")
    assert folder.read_attempts()[0].exit == 85

    code, out, err = launch(tmp_path, "obey_stop", TWO_RANKS, STEPS)
    assert (code, err) == (0, "")
    assert "attempt 2" in out
    assert "step   2/600" in out
    assert "step   1/600" not in out
    assert (state_of(folder).state, state_of(folder).step, state_of(folder).attempt) == ("done", 2, 2)
    assert [row.exit for row in folder.read_attempts()] == [85, 0]


def test_a_run_that_saves_nothing_says_so(tmp_path: Path) -> None:
    run = Launch(tmp_path, "obey_stop", TWO_RANKS, STEPS, "checkpoint=none")
    run.wait_for("seen-0.json", "seen-1.json")
    os.killpg(run.process.pid, signal.SIGINT)
    out = run.finish()[1]
    assert "Stopping: the run stops after this step, and saves nothing. Press Ctrl-C again" in out
    assert "Type the same command to begin it again, as it saves nothing (checkpoint.mode=off)." in out


def test_numbers_of_steps_that_were_lost_are_not_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [{"step": step, "loss": 1 / step, "validation_loss": 1 / step, "attempt": 1} for step in (1, 40, 70)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.write_state(RunState("preempted", 1, time.time(), 2, "Ctrl-C"))
    summary = summarize(folder)
    assert (summary.step, summary.loss, summary.validation_loss) == (1, 1.0, 1.0)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    run = Launch(tmp_path, "wait_for_ever", TWO_RANKS)
    folder = run.wait_for("seen-0.json", "seen-1.json")
    os.killpg(run.process.pid, signal.SIGINT)
    wait_until(folder.stop_requested)
    assert len(ranks_of(tmp_path)) == 3  # the controller and both ranks, waiting
    time.sleep(0.6)  # closer together they count as one
    os.killpg(run.process.pid, signal.SIGINT)
    code, _, _ = run.finish()
    assert code == 130
    assert ranks_of(tmp_path) == []
    assert state_of(folder).state == "preempted"


def test_duplicate_signal_counts_once(tmp_path: Path) -> None:
    run = Launch(tmp_path, "obey_stop", FAKE_SAVE_SECONDS="0.5")
    folder = run.wait_for("seen-0.json")
    for _ in range(2):
        os.kill(run.process.pid, signal.SIGTERM)
        time.sleep(0.05)
    assert run.finish()[0] == 130
    assert (folder.path / "saved-0").exists()
    assert state_of(folder).state == "preempted"


def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    # Tests under nohup ignore SIGHUP, and so would the run.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run = Launch(tmp_path, "obey_stop")
    finally:
        signal.signal(signal.SIGHUP, before)
    folder = run.wait_for("seen-0.json")
    os.killpg(run.process.pid, signal.SIGHUP)
    assert run.finish()[0] == 130
    assert state_of(folder).state == "preempted"


def test_stop_requested_in_the_folder(tmp_path: Path) -> None:
    run = Launch(tmp_path, "obey_stop", TWO_RANKS)
    run.wait_for("seen-0.json").request_stop("enough")
    code, out, _ = run.finish()
    assert code == 85
    assert "Type the same command to continue it." in out
    assert (state_of(run.folder).state, state_of(run.folder).reason) == ("preempted", "enough")


def test_a_failed_run_is_started_again_and_a_done_one_is_not(tmp_path: Path) -> None:
    assert launch(tmp_path, "fail_once", "tracking.log_every=10")[0] == 1
    code, out, _ = launch(tmp_path, "fail_once", "tracking.log_every=7")
    assert code == 0
    assert "after attempt 1 (rank 0: RuntimeError: out of luck)" in out
    (path,) = (tmp_path / "x").iterdir()
    assert "log_every: 7" in (path / "config.yaml").read_text()
    assert "log_every: 10" in (path / "logs/attempt-001/config.yaml").read_text()

    (path / ".lock").unlink()
    (path / ".lock").mkdir()  # stands in for the lock of another user
    code, out, _ = launch(tmp_path, "fail_once")
    assert code == 0
    assert "nothing starts" in out
    assert str(path) in out
    assert len(RunFolder(path).read_attempts()) == 2


def test_a_running_run_is_refused(tmp_path: Path) -> None:
    first = Launch(tmp_path, "obey_stop")
    folder = first.wait_for("seen-0.json", "heartbeat")
    code, _, err = launch(tmp_path, "obey_stop")
    assert code == 2
    assert f"process {first.process.pid}" in err
    assert "last heartbeat" in err
    assert "Traceback" not in err
    os.kill(first.process.pid, signal.SIGINT)
    assert first.finish()[0] == 130
    assert len(folder.read_attempts()) == 1


def test_one_of_concurrent_launchers_runs(tmp_path: Path) -> None:
    runs = [Launch(tmp_path, "obey_stop") for _ in range(3)]
    wait_until(lambda: sum(run.process.poll() is None for run in runs) == 1)
    (winner,) = (run for run in runs if run.process.poll() is None)
    winner.wait_for("seen-0.json").request_stop("enough")
    ends = [run.finish() for run in runs]
    assert sorted(code for code, _, _ in ends) == [2, 2, 85]
    assert all("already running" in err for code, _, err in ends if code == 2)
    assert len(winner.folder.read_attempts()) == 1


def test_orphaned_run_saves_stops_and_is_resumed(tmp_path: Path) -> None:
    first = Launch(tmp_path, "obey_stop", TWO_RANKS, FAKE_SAVE_SECONDS="1", TMPDIR=str(tmp_path))
    folder = first.wait_for("seen-0.json", "seen-1.json")
    first.process.kill()
    code, out, err = launch(tmp_path, "obey_stop", TWO_RANKS)
    assert (code, err) == (0, "")
    assert "launcher is gone" in out
    first.finish()
    assert [row.exit for row in folder.read_attempts()] == [85, 0]
    assert folder.read_attempts()[0].reason == "the launcher is gone"
    assert not any(tmp_path.glob("titan_exp-*"))  # the last orphan removed their meeting place
    assert state_of(folder).state == "done"


def test_orphans_do_not_wait_for_a_dead_peer(tmp_path: Path) -> None:
    run = Launch(tmp_path, "wait_for_ever", TWO_RANKS)
    folder = run.wait_for("seen-0.json", "seen-1.json")
    (rank_1,) = (p for p in ranks_of(tmp_path) if p.environ().get("SUBMITIT_LOCAL_GLOBALID") == "1")
    run.process.kill()
    rank_1.kill()
    run.process.communicate(timeout=LIMIT)  # not held open by what is left of the run
    wait_until(lambda: not ranks_of(tmp_path))
    run.finish()
    assert state_of(folder).state == "failed"
    assert "another rank died" in (state_of(folder).reason or "")


def test_a_broken_pipe_does_not_end_a_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.launch.launching", "model=llama_debug", f"paths.runs={tmp_path}"],
        env=launch_environment("succeed"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, b"")
    (path,) = tmp_path.glob("first/*")
    assert state_of(RunFolder(path)).state == "done"


def test_start_is_refused_while_orphans_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_end, "ORPHANS_LIMIT", 0.3)
    planned = plan_run(to_experiment(compose(["model=llama_debug", f"paths.runs={tmp_path}"])))
    create_run_folder(planned)
    with planned.folder.join(0), pytest.raises(UserError, match="rank 0, process"):
        run(planned)
    assert planned.folder.read_attempts() == []
    with planned.folder.claim("launcher"):  # released
        pass


def test_run_folder_depends_on_effective_keys(tmp_path: Path) -> None:
    experiment = to_experiment(compose(["model=llama_debug", f"paths.runs={tmp_path}", "tracking.log_every=3"]))
    assert not plan_run(experiment, []).folder.path.exists()
    assert launch(tmp_path, "succeed", "experiment.name=first")[0] == 0
    assert plan_run(experiment, []).folder.path.exists()
