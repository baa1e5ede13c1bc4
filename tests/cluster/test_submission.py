"""Submission to a real SLURM: resources, idempotence, and kills in between."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.submitting import SMALL, Submitting, ends, last
from titan_exp.cli.main import main
from titan_exp.launch.slurm.submit import submissions_folder

REPOSITORY = Path(__file__).resolve().parents[2]
StandIn = Callable[[str], None]


@pytest.mark.night
def test_a_sweep_over_tensor_parallelism_asks_for_the_nodes_of_each_run(cluster: Submitting, stand_in: StandIn):
    stand_in("succeed")
    words = [*SMALL, f"paths.runs={cluster.runs}", "cluster.processes_per_node=2", "parallelism.tp=1,2,4"]

    def sweep() -> str:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "titan_exp", "train", "-m", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    said = sweep()
    assert "3 submitted" in said
    assert "titan-exp logs -f" in said
    plans = [cluster.plan("cluster.processes_per_node=2", f"parallelism.tp={tp}") for tp in (1, 2, 4)]
    jobs = [cluster.slurm.job(last(plan.folder).job_id or "") for plan in plans]
    # Of a job that waits, `1-1`: at least and at most.
    nodes = [job["NumNodes"].partition("-")[0] for job in jobs]
    assert [*zip(nodes, (job["NumTasks"] for job in jobs), strict=True)] == [("1", "1"), ("1", "2"), ("2", "4")]
    assert {submission.outcome for submission in cluster.submit(*plans)} <= {"queued", "running", "done"}
    for plan in plans:
        cluster.ended(plan.folder, "done")
    assert "3 done" in sweep()
    assert [len(plan.folder.read_attempts()) for plan in plans] == [1, 1, 1]
    assert cluster.slurm.queue() == {}


def test_equal_resources_are_one_array(cluster: Submitting, stand_in: StandIn):
    stand_in("die_unless_lucky")
    plans = [cluster.plan(f"experiment.seed={seed}") for seed in (0, 1, 2)]
    submissions = cluster.submit(*plans)
    array = (submissions[0].job_id or "").partition("_")[0]
    assert [submission.job_id for submission in submissions] == [f"{array}_{index}" for index in range(3)]
    cluster.ended(plans[0].folder, "done")
    assert cluster.ended(plans[1].folder, "failed") == "rank 0: RuntimeError: seed 1 is unlucky"
    cluster.ended(plans[2].folder, "done")
    # Only the one that failed is submitted again, and alone.
    again = cluster.submit(*plans)
    assert [submission.outcome for submission in again] == ["done", "submitted", "done"]
    assert (again[1].job_id or "_").isdigit()
    cluster.wait_until(lambda: ends(plans[1].folder) == [1, 1], lambda: cluster.story(plans[1].folder))


def test_code_edited_while_a_job_waits_has_no_effect(cluster: Submitting, tmp_path: Path):
    copy = tmp_path / "checkout"
    for name in ("titan_exp", "hydra_plugins", "conf"):
        shutil.copytree(REPOSITORY / name, copy / name)
    edited = copy / "titan_exp" / "stand_in.py"
    edited.write_text("def main(path):\n    open(f'{path}/ran', 'w').write('as submitted')\n")
    words = [*SMALL, f"paths.runs={cluster.runs}", "cluster.sbatch_args=['--hold']"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "TITAN_EXP_RANK_MAIN": "titan_exp.stand_in.main"}
    command = [sys.executable, "-m", "titan_exp", "train", *words]
    done = subprocess.run(command, env=environment, cwd=copy, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    folder = cluster.plan().folder
    edited.write_text("def main(path):\n    raise RuntimeError('edited')\n")
    (copy / "titan_exp" / "launch" / "rank" / "main.py").unlink()
    assert cluster.status(folder).state == "queued"
    cluster.slurm.run("scontrol", "release", last(folder).job_id or "")
    cluster.ended(folder, "done")
    assert (folder.path / "ran").read_text() == "as submitted"


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.night)])
def test_the_submitting_process_is_killed_in_the_middle(
    cluster: Submitting, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """`kill -9` before sbatch has made the job, and after, before it has answered."""
    stand_in("succeed")
    real, slow = cluster.slurm.path("sbatch"), tmp_path / "bin" / "sbatch"
    wait = f"touch {tmp_path}/reached; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    lines = [wait, f'{real} "$@"'] if moment == "before" else [f'{real} "$@" >{tmp_path}/made', wait]
    write_program(slow, "\n".join(lines))
    path = os.environ["PATH"]
    words = [*SMALL, f"paths.runs={cluster.runs}", "experiment.seed=0,1", "cluster.comment=project 42"]
    environment = {**os.environ, "PATH": f"{slow.parent}:{path}", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_exp", "train", "-m", *words], env=environment, stdout=subprocess.DEVNULL
    )
    plans = [cluster.plan(f"experiment.seed={seed}") for seed in (0, 1)]
    cluster.wait_until((tmp_path / "reached").exists, cluster.slurm.state)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [last(plan.folder).job_id for plan in plans] == [None, None] or moment == "after"
    if moment == "before":
        # sbatch is an orphan that may still make the job: neither is a second one made, nor is this one forgotten.
        refused = cluster.submit(*plans)
        assert [submission.outcome for submission in refused] == ["refused", "refused"]
        assert "still waits for SLURM" in (refused[0].reason or "")
    (tmp_path / "go").touch()
    time.sleep(1)
    assert {submission.outcome for submission in cluster.submit(*plans)} <= {"queued", "running", "done"}
    for plan in plans:
        cluster.ended(plan.folder, "done")
    assert [ends(plan.folder) for plan in plans] == [[0], [0]]
    assert cluster.slurm.queue() == {}


@pytest.mark.night
def test_a_submission_that_died_before_sbatch_is_submitted(cluster: Submitting, stand_in: StandIn):
    stand_in("succeed")
    planned = cluster.plan()
    (first,) = cluster.submit(planned)
    cluster.ended(planned.folder, "done")
    # As if it had been written down and nothing more: no job carries this token.
    planned.folder.attempts.unlink()
    planned.folder.state.write_text('{"state": "pending", "step": 0, "time": 0, "attempt": 0, "reason": null}')
    planned.folder.add_attempt(world_size=1, hosts=(), launched_by="slurm", token="0123456789ab")
    (again,) = cluster.submit(planned)
    assert (again.outcome, again.job_id != first.job_id) == ("submitted", True)
    cluster.ended(planned.folder, "done")
    assert [row.reason for row in planned.folder.read_attempts()] == ["its job is gone and never started", None]


@pytest.mark.night
def test_status_is_unknown_without_the_controller(
    cluster: Submitting,
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    stand_in("obey_stop")
    monkeypatch.chdir(tmp_path)
    folder, job = cluster.submitted()
    cluster.running(folder, "seen-0.json")

    def typed(code: int, *words: str) -> str:
        assert main([*words, f"paths.runs={cluster.runs}"]) == code, capsys.readouterr()
        out, err = capsys.readouterr()
        assert not re.search(r"(squeue|scancel|sbatch): (error|fatal)", out + err)
        return out + err

    def check_status(why: str):
        (row,) = json.loads(typed(0, "status", "--json"))
        assert row["state"] == "unknown"
        assert row["reason"].startswith("slurm does not answer: ")
        assert why in row["reason"]
        assert "after step 1" in row["reason"]

    programs, run_id, squeue = tmp_path / "bin", folder.path.name, cluster.slurm.path("squeue")
    with monkeypatch.context() as changed:
        changed.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        lines = ("error: fetch_config: DNS SRV lookup failed", "fatal: Could not establish a configuration source")
        write_program(programs / "squeue", "; ".join(f"echo squeue: {line} >&2" for line in lines) + "; exit 1")
        check_status("this machine belongs to no cluster")
        write_program(programs / "squeue", "echo Welcome to the cluster")
        check_status("squeue printed no table of jobs: 'Welcome to the cluster")
        assert "1 unknown" in typed(0, "status")
        assert "not retried, since it may be queued or running: slurm does not answer" in typed(2, "retry", run_id)
        assert "not cancelled: SLURM does not answer: " in typed(2, "cancel", run_id)
        assert "SLURM does not answer, and the run may be in its queue: " in typed(2, "train", *SMALL)
    cluster.slurm.stop_controller()
    try:
        check_status("the controller of the cluster does not answer")
        assert "unknown after step 1 of 6\n  slurm does not answer: the controller" in typed(0, "show", run_id)
        assert "the controller of the cluster does not answer" in typed(2, "cancel", run_id)
        (refused,) = cluster.submit(cluster.plan())
        assert (refused.outcome, refused.job_id) == ("refused", job)
        assert "SLURM does not answer" in (refused.reason or "")
    finally:
        cluster.slurm.start_controller()
    assert len(folder.read_attempts()) == 1
    # A filter of the user's own squeue is not taken for an answer, nor a notice of the site for a job.
    monkeypatch.setenv("SQUEUE_PARTITION", "elsewhere")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    write_program(programs / "squeue", f'echo Welcome; exec {squeue} "$@"')
    assert cluster.status(folder).state == "running"
    (left_alone,) = cluster.submit(cluster.plan())
    assert (left_alone.outcome, left_alone.job_id) == ("running", job)
    folder.request_stop("the test is over")
    cluster.ended(folder, "done")


def test_job_is_found_whatever_sbatch_prints(
    cluster: Submitting, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in("succeed")
    sbatch, programs = cluster.slurm.path("sbatch"), tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    late = "echo sbatch: error: Batch job submission failed: Socket timed out >&2; exit 1"
    plans = [cluster.plan(f"experiment.seed={seed}") for seed in range(4)]
    for plan, words in zip(plans, ("echo Welcome", late, r"printf '\\377'", "true"), strict=True):
        write_program(programs / "sbatch", f'{sbatch} "$@" > /dev/null; {words}')
        (submission,) = cluster.submit(plan)
        assert (submission.outcome, submission.reason) == ("submitted", None)
        assert cluster.slurm.job(submission.job_id or "")["Comment"] == f"titan_exp:{last(plan.folder).token}"
    write_program(programs / "sbatch", "echo Welcome")
    planned = cluster.plan("experiment.seed=4")
    (refused,) = cluster.submit(planned)
    assert refused.outcome == "refused"
    assert refused.reason == "sbatch printed no job id: 'Welcome'. Type the same command again to ask SLURM for the job"
    (programs / "sbatch").unlink()
    assert [submission.outcome for submission in cluster.submit(planned)] == ["submitted"]
    for plan in (*plans, planned):
        cluster.ended(plan.folder, "done")
    assert [len(plan.folder.read_attempts()) for plan in (*plans, planned)] == [1, 1, 1, 1, 2]


def test_job_of_a_deleted_or_restarted_run_ends_at_once(cluster: Submitting, stand_in: StandIn):
    stand_in("succeed")
    hold = "cluster.sbatch_args=['--hold']"
    folder, job = cluster.submitted(hold)
    log = submissions_folder(cluster.runs) / (last(folder).token or "") / f"slurm-{job}.out"
    shutil.rmtree(folder.path)
    cluster.slurm.run("scontrol", "release", job)
    assert cluster.slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
    assert f"the run folder was deleted or moved, so job {job} ends" in log.read_text()
    assert not folder.path.exists()

    _, anew = cluster.submitted(hold)
    cluster.slurm.run("scontrol", "requeue", job)
    cluster.slurm.wait_until(lambda: "this run was started anew" in log.read_text(), "the old job's words")
    assert cluster.slurm.wait_for(job, "FAILED")["ExitCode"] == "2:0"
    cluster.slurm.run("scontrol", "release", anew)
    cluster.ended(folder, "done")
    (row,) = folder.read_attempts()
    assert (row.job_id, row.exit) == (anew, 0)


def write_program(path: Path, text: str):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_sbatch_rejection_is_reported_and_can_be_resubmitted(cluster: Submitting, stand_in: StandIn):
    stand_in("succeed")
    (refused,) = cluster.submit(cluster.plan("cluster.partition=nowhere"))
    assert refused.outcome == "refused"
    asked, *said, remedy, listed = (refused.reason or "").splitlines()
    assert asked.startswith("asked: --partition=nowhere --nodes=1 ")
    assert all(line.startswith("sbatch: error: ") for line in said)
    assert remedy == "Type another partition:"
    assert listed == "  cluster.partition=h100  time limit infinite, nodes 4, GRES gpu:h100:8"
    folder, _ = cluster.submitted(listed.split()[0])
    cluster.ended(folder, "done")


@pytest.mark.night
def test_a_run_that_continues_with_other_code_says_so(
    cluster: Submitting, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in("fail_once")
    decay = tmp_path / "mine" / "decay_of_mine.py"
    decay.parent.mkdir()
    decay.write_text("def slow(progress): return 1 - progress\n")
    monkeypatch.syspath_prepend(str(decay.parent))
    run = cluster.plan("lr_schedule.decay=decay_of_mine.slow")
    cluster.submit(run)
    cluster.ended(run.folder, "failed")
    assert not any("changed" in line for line in cluster.said)
    decay.write_text("def slow(progress): return 1\n")
    cluster.submit(run)
    said = "Code changed since attempt 1:\n  mine: no commit; 1 file differs: decay_of_mine.py"
    assert said in cluster.said
    cluster.ended(run.folder, "done")
    assert said in (run.folder.attempt_logs(2) / "rank-00000.log").read_text()
    assert "return 1\n" in run.folder.diff.read_text()
    assert "return 1 - progress\n" in (run.folder.attempt_logs(1) / "diff.patch").read_text()
