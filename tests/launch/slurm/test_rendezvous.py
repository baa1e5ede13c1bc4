"""RankInfo from srun's environment variables."""

import os

import pytest

from titan_exp.launch.rank.rank_env import TOKEN
from titan_exp.launch.slurm.executor import SlurmExecutor, srun_rank

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "16",
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-2],gpu07",
}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", TOKEN, "CUDA_VISIBLE_DEVICES", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_step_started_by_hand(step: pytest.MonkeyPatch):
    rank = srun_rank()
    assert rank is not None
    assert (rank.rank, rank.world_size, rank.local_rank) == (5, 8, 1)
    assert rank.hosts == ("node1", "node2", "gpu07")
    assert (rank.job_id, rank.token) == ("12.0", None)


def test_array_task_is_named_by_array_and_task(step: pytest.MonkeyPatch):
    step.setenv("SLURM_ARRAY_JOB_ID", "12")
    step.setenv("SLURM_ARRAY_TASK_ID", "3")
    step.setenv(TOKEN, "feed_3")
    step.setenv("SLURM_RESTART_COUNT", "2")
    rank = srun_rank()
    assert rank is not None
    assert (rank.job_id, rank.token, rank.restarts) == ("12_3", "feed_3", 2)


def test_a_submitted_job_counts_by_srun_whoever_sets_rank(step: pytest.MonkeyPatch):
    for name, value in {TOKEN: "feed", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere"}.items():
        step.setenv(name, value)
    rank = SlurmExecutor("slurm").rank_info()
    assert rank is not None
    assert (rank.rank, rank.world_size, rank.token) == (5, 8, "feed")
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & {*os.environ} == set()


@pytest.mark.parametrize(("shown", "local"), [("0,1", 1), ("1", 0), ("GPU-8f2a", 0)])
def test_a_task_that_sees_one_gpu_takes_it(step: pytest.MonkeyPatch, shown: str, local: int):
    step.setenv("CUDA_VISIBLE_DEVICES", shown)
    rank = srun_rank()
    assert rank is not None
    assert rank.local_rank == local


@pytest.mark.parametrize("change", [("RANK", "0"), ("SLURM_STEP_ID", None)])
def test_torchrun_under_srun_and_batch_script_without_srun(step: pytest.MonkeyPatch, change: tuple[str, str | None]):
    name, value = change
    step.delenv(name) if value is None else step.setenv(name, value)
    assert srun_rank() is None
