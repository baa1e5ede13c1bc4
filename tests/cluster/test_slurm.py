"""SLURM of these tests: nodes, tasks, GPUs, limits, requeueing, draining, and a restarted controller."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.keeper import belonging_to
from tests.cluster.slurm import GPUS_PER_NODE, NODES, Slurm

REPOSITORY = Path(__file__).parents[2]


def test_ranks_and_gpus_of_tasks(slurm: Slurm):
    words = "$SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    printed = slurm.run("srun", "-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c", f"echo {words}")
    assert sorted(printed.splitlines()) == ["0 0 0 node1 0", "1 1 0 node1 1", "2 0 1 node2 0", "3 1 1 node2 1"]


def test_gpus_are_counted(slurm: Slurm):
    jobs = [slurm.sbatch("sleep 100", "--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=8") for _ in range(3)]
    slurm.wait_until(lambda: sorted(slurm.queue().values()) == ["PENDING", "RUNNING", "RUNNING"], "two of three jobs")
    slurm.wait_until(lambda: slurm.job(jobs[2])["Reason"] in ("Resources", "Priority"), "the reason of the third")
    asked = slurm.run("sbatch", f"--gpus-per-node={GPUS_PER_NODE + 1}", "--wrap=true", check=False)
    assert "Submitted" not in asked


def test_an_array_and_an_exit_code(slurm: Slurm):
    job = slurm.sbatch("exit $SLURM_ARRAY_TASK_ID", "--array=0-3")
    assert slurm.wait_for(f"{job}_0", "COMPLETED")["ExitCode"] == "0:0"
    assert slurm.wait_for(f"{job}_3", "FAILED")["ExitCode"] == "3:0"


def test_a_requeued_job_starts_again_soon(slurm: Slurm):
    job = slurm.sbatch('echo "start $SLURM_RESTART_COUNT"; [ "$SLURM_RESTART_COUNT" = 1 ] || sleep 100')
    slurm.wait_until(lambda: "start" in slurm.output(job), "the first start")
    slurm.run("scontrol", "requeue", str(job))
    assert slurm.wait_for(job, "COMPLETED")["Restarts"] == "1"
    assert slurm.output(job).count("start") == 2


@pytest.mark.slow
def test_the_batch_script_is_warned_before_its_time_is_up(slurm: Slurm):
    # Limits are looked at every half minute, and a signal may come up to a minute early: at once for this job.
    job = slurm.sbatch("trap 'echo warned; exit 7' USR2; sleep 100 & wait", "--time=1", "--signal=B:USR2@60")
    assert slurm.wait_for(job, "FAILED", limit=90)["ExitCode"] == "7:0"
    assert "warned" in slurm.output(job)


def test_a_drained_node_gets_no_jobs_and_comes_back(slurm: Slurm):
    slurm.drain("node1")
    assert slurm.run("srun", "sh", "-c", "echo $SLURMD_NODENAME").strip() == "node2"
    slurm.resume("node1")
    assert set(slurm.nodes().values()) <= {"idle", "mixed"}


def test_job_runs_while_the_controller_is_down(slurm: Slurm):
    job = slurm.sbatch("sleep 3; echo done")
    slurm.wait_for(job, "RUNNING")
    slurm.stop_controller()
    assert "DOWN" in slurm.run("scontrol", "ping", check=False)
    slurm.start_controller()
    slurm.wait_for(job, "COMPLETED")
    assert "done" in slurm.output(job)


def test_accounting(accounted_slurm: Slurm):
    job = accounted_slurm.sbatch("exit 3", "--job-name=counted")
    accounted_slurm.wait_for(job, "FAILED")

    def accounts() -> bool:
        words = ["-X", "-n", "-P", "-o", "JobName,State,ExitCode", "-j", str(job)]
        return accounted_slurm.run("sacct", *words).strip() == "counted|FAILED|3:0"

    accounted_slurm.wait_until(accounts, "the job in the accounts")


def test_nothing_outlives_a_killed_test_process(slurm: Slurm):
    """`kill -9` of the process that started a SLURM, with a job in it."""
    words = "from tests.cluster.slurm import Slurm; s = Slurm(); "
    words += "s.wait_for(s.sbatch('sleep 1000'), 'RUNNING'); print(s.folder, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", words],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    members = belonging_to(folder)  # munged, slurmctld and a slurmd for each node, at the least
    assert len(members) >= len(NODES) + 2
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(members, timeout=60)[1]
    deadline = time.monotonic() + 30
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(folder).exists()
    assert slurm.nodes().keys() == set(NODES)  # another SLURM beside it is untouched
