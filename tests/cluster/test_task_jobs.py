"""Jobs that score tasks, in a real SLURM."""

import os
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.extensions.tasks.test_jobs import WORDS, logs, toy, until
from tests.parity.runs import train
from titan_exp.extensions.tasks.jobs import Jobs
from titan_exp.extensions.tasks.scores import evaluation_file
from titan_exp.tracking.run_folder.run_folder import RunFolder


def _use(config: str) -> None:
    os.environ.update(SLURM_CONF=config, SLURM_JOB_ID="1", SLURM_PROCID="0")  # as in a job


def test_a_job_in_the_queue_is_not_submitted_again(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm.config))
    path = tmp_path / "run"
    words = [*WORDS, "training.steps=2", f"evaluation.tasks=[{toy(tmp_path / 'toy')}]", "evaluation.where=jobs"]
    words += ["+evaluation.job.kind=slurm", "+evaluation.job.cpus_per_gpu=2", "+evaluation.job.time_limit='5'"]
    words += ["+evaluation.job.sbatch_args=[--hold]"]
    jobs = Jobs(RunFolder(path))
    for _ in range(2):
        train(path, *words, mutate=partial(_use, str(slurm.config)))
        assert jobs.open_steps() == [2]
        assert jobs.waiting("slurm") == []
    (job,) = slurm.queue()
    asked = slurm.job(job)
    assert (asked["TimeLimit"], asked["NumCPUs"]) == ("00:05:00", "2")
    slurm.run("scontrol", "release", job)
    until(lambda: not slurm.queue(), lambda: (slurm.state(), logs(path)))
    assert not jobs.open_steps()
    assert logs(path) == {"step-00000002": [f"step 2: {evaluation_file(path, 2)}"]}
