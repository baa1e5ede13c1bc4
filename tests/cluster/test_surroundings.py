"""Submissions from odd surroundings: another launcher's environment, variables of sbatch, folders with odd names."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.submitting import SMALL, Submitting, ends, last
from tests.launch.launching import seen
from titan_exp.cli.main import main

StandIn = Callable[[str], None]
TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "nowhere.invalid",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TWO_RANKS = ("cluster.processes_per_node=2", "parallelism.tp=2")


def test_ranks_of_a_submission_from_within_another_launch(
    cluster: Submitting, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
):
    """torchrun's shell submits, a hook of the container runtime names ranks, and another run of ours is around."""
    stand_in("succeed")
    for name, value in (TORCHRUN | {"TITAN_EXP_GROUP": "1", "TITAN_EXP_RENDEZVOUS": "/nowhere"}).items():
        monkeypatch.setenv(name, value)
    hook = " ".join(f"{name}={value}" for name, value in TORCHRUN.items())
    folder, job = cluster.submitted(*TWO_RANKS, f'cluster.setup=["export {hook}"]')
    assert cluster.ended(folder, "done", "failed") is None
    assert (ends(folder), last(folder).launched_by, last(folder).job_id) == ([0], "slurm", job)
    for rank in range(2):
        env = seen(folder, rank)["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["TITAN_EXP_RENDEZVOUS"] is None
    assert os.environ["RANK"] == "0"  # the shell's own are untouched


@pytest.mark.parametrize("by", ["variable", "argument"])
def test_ranks_get_the_snapshot_without_the_submitting_environment(
    cluster: Submitting, monkeypatch: pytest.MonkeyPatch, by: str
):
    stand_in = "+cluster.environment={TITAN_EXP_RANK_MAIN:tests.launch.fake_ranks.succeed}"
    words = [*TWO_RANKS, "cluster.cpus_per_gpu=3", stand_in]
    if by == "variable":
        monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    else:
        words.append("cluster.sbatch_args=['--export=NONE']")
    folder, _ = cluster.submitted(*words)
    assert cluster.ended(folder, "done", "failed") is None
    assert ends(folder) == [0]
    found = seen(folder, 1)
    assert found["env"]["OMP_NUM_THREADS"] == "3"
    assert next(path for path in found["path"] if "/.code-" in path).startswith(str(cluster.runs))


def test_a_generated_module_is_in_the_job(cluster: Submitting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "own"
    (own / "generating").mkdir(parents=True)
    (own / "generating" / "_version.py").write_text("VERSION = 'generated'\n")
    (own / ".gitignore").write_text("_version.py\n")
    (own / "generating" / "decay.py").write_text(
        "from pathlib import Path\nfrom generating._version import VERSION\n"
        "def slow(progress): return 1 - progress\n"
        "def main(path): (Path(path) / 'ran').write_text(VERSION + __file__)\n"
    )
    subprocess.run(["git", "init", "-q", str(own)], check=True)
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.setenv("TITAN_EXP_RANK_MAIN", "generating.decay.main")
    folder, _ = cluster.submitted("lr_schedule.decay=generating.decay.slow")
    assert cluster.ended(folder, "done", "failed") is None
    assert (folder.path / "ran").read_text().startswith(f"generated{cluster.runs}/.code-")


def test_the_configuration_beats_variables_of_sbatch(cluster: Submitting, monkeypatch: pytest.MonkeyPatch):
    ours = {
        "TIMELIMIT": "7",
        "PARTITION": "nowhere",
        "ACCOUNT": "nobody",
        "MEM_PER_CPU": "77",
        "MEM_PER_GPU": "78",
        "GPUS": "3",
        "GPUS_PER_TASK": "5",
        "CPUS_PER_GPU": "7",
        "GRES": "gpu:2",
        "NO_REQUEUE": "1",
        "ARRAY_INX": "0-3",
        "JOB_NAME": "another",
        "OUTPUT": "/nowhere/log",
        "SIGNAL": "USR1@7",
        "HINT": "nomultithread",
    }
    for name, value in ours.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    typed = ["cluster.time_limit=1:00:00", "cluster.partition=h100", "cluster.memory_gb=2", "cluster.cpus_per_gpu=2"]
    typed += ["cluster.account=mine", "cluster.device=cuda", "cluster.gpus_per_node=2"]
    folder, job = cluster.submitted(*typed, "cluster.sbatch_args=['--hold','--hint=multithread']")
    shown = cluster.slurm.job(job)
    assert (shown["TimeLimit"], shown["Partition"], shown["Account"]) == ("01:00:00", "h100", "mine")
    assert (shown["MinMemoryNode"], shown["Requeue"], shown["CPUs/Task"]) == ("2G", "1", "2")
    assert (shown["JobName"], shown["StdOut"].startswith(str(cluster.runs))) == (f"x-{folder.path.name}", True)
    assert shown["TresPerNode"] == "gres:gpu:2"
    cluster.slurm.run("scancel", job)
    # A key that is left open takes the default that the site or the user has set.
    for name in {*ours} - {"TIMELIMIT", "MEM_PER_CPU"}:
        monkeypatch.delenv(f"SBATCH_{name}")
    _, job = cluster.submitted("cluster.sbatch_args=['--hold']", "experiment.seed=1")
    shown = cluster.slurm.job(job)
    assert (shown["TimeLimit"], shown["MinMemoryCPU"]) == ("00:07:00", "77M")
    cluster.slurm.run("scancel", job)


def test_a_dry_run_shows_the_script_of_the_submission(
    cluster: Submitting, stand_in: StandIn, capsys: pytest.CaptureFixture[str]
):
    stand_in("succeed")
    words = [*SMALL, f"paths.runs={cluster.runs}", "cluster.time_limit=10", "plan.gate=off"]
    assert main(["train", "--dry-run", *words]) == 0
    said, _, script = capsys.readouterr().out.partition("\n\n")
    folder = cluster.plan("cluster.time_limit=10", "plan.gate=off").folder
    assert said.splitlines()[-1] == f"would start {folder.path}, 1 node with 1 process each, to step 20"
    assert not cluster.runs.exists()
    assert main(["train", *words]) == 0
    (row,) = folder.read_attempts()
    assert script == (folder.path / "job.sh").read_text().replace(row.token or "", "TOKEN")
    cluster.ended(folder, "done")
    capsys.readouterr()
    assert main(["train", "--dry-run", *words]) == 0
    assert f"would start nothing: {folder.path} is done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["50%j 100%", 'it\'s "$HOME" #SBATCH --time=1', "Läufe-日本 ~*?[a]{b};&|!`x`"])
def test_a_folder_of_runs_with_an_odd_name(cluster: Submitting, stand_in: StandIn, tmp_path: Path, name: str):
    stand_in("succeed")
    typed = str(tmp_path / name).replace("'", r"\'")
    run = cluster.plan(f"paths.runs='{typed}'")
    cluster.submit(run)
    assert cluster.ended(run.folder, "done", "failed") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    (job,) = [row.job_id for row in run.folder.read_attempts()]
    assert f"job {job}, start 0" in (run.folder.logs / f"slurm-{job}.out").read_text()
    assert "hello from rank 0" in (run.folder.attempt_logs(1) / "rank-00000.log").read_text()
