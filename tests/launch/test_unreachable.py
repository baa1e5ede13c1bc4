"""Commands that submit where the cluster does not answer: refused before anything is written."""

import time
from pathlib import Path

import pytest

from tests.config.composing import experiment
from tests.launch.test_shipped_study import no_cluster
from titan_exp.cli.main import main
from titan_exp.launch.run_plan import create_run_folder, plan_run
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

WORDS = ["model=llama_debug", "cluster=slurm", "cluster.device=cpu", "training.steps=4"]
STUDY = "question: Which?\nheld_fixed: [cluster=slurm, cluster.device=cpu]\naxes: [{grid: {training.steps: [2, 3]}}]\n"


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that failed on SLURM, in a folder that also has a study."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(STUDY)
    plan = plan_run(experiment(*WORDS, "experiment.name=before"))
    create_run_folder(plan)
    row = plan.folder.add_attempt(world_size=1, hosts=("node1",), launched_by="slurm", job_id="7", token="t")
    plan.folder.update_attempt(row.attempt, start=1.0, end=2.0, exit=1)
    plan.folder.write_state(RunState("failed", 1, time.time(), 1, "out of luck"))
    return plan.folder.path


@pytest.fixture(params=["sbatch is not installed", "SLURM does not answer"])
def says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Words about a machine without SLURM, and about one without a cluster."""
    installed = request.param == "SLURM does not answer"
    monkeypatch.setattr("shutil.which", lambda command: command if installed else None)
    monkeypatch.setattr("titan_exp.launch.slurm.squeue.subprocess.run", no_cluster)
    return request.param


@pytest.mark.parametrize(
    "words",
    [
        ["train", *WORDS],
        ["train", "-m", *WORDS, "experiment.seed=0,1"],
        ["sweep", "mine"],
        ["retry", "{failed}"],
        ["retry", "{failed}", "training.steps=5", "checkpoint.continue_from=null"],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_nothing_is_left_behind(words: list[str], says: str, failed: Path, capsys: pytest.CaptureFixture[str]):
    home = failed.parents[2]
    before = {path: path.read_bytes() if path.is_file() else b"" for path in home.rglob("*")}
    assert main([word.format(failed=failed) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count(says) == 1
    assert "cluster=local" in error, "what to type"
    assert {path: path.read_bytes() if path.is_file() else b"" for path in home.rglob("*")} == before


def test_a_run_that_is_done_needs_no_cluster(
    failed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    RunFolder(failed).write_state(RunState("done", 4, time.time(), 1, None))
    monkeypatch.setattr("shutil.which", lambda command: command)
    monkeypatch.setattr("titan_exp.launch.slurm.squeue.subprocess.run", no_cluster)
    assert main(["train", *WORDS, "experiment.name=before"]) == 0
    assert "done job 7: " in capsys.readouterr().out
