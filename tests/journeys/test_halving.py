"""Successive halving with real runs: killed in the middle of a rung, it ends as if it had never been.

SIGKILL takes the searching process alone, or its whole process group.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.journeys.command import TITAN_EXP, titan_exp
from titan_exp.launch.run_lookup import StudyFolder
from titan_exp.tracking.run_folder.run import read_history
from titan_exp.tracking.run_folder.run_folder import RunFolder

STUDY = """\
question: Which rate?
held_fixed:
  - model=llama_debug
  - training.seq_len=32
  - training.global_batch_size=2
  - training.steps=40
  - evaluation.every=40
  - data.validation_documents=2
  - tracking.log_every=1
  - checkpoint.every=10
  - checkpoint.keep=1
  - cluster.device=cpu
axes:
  - grid: {optimizer.lr: [1e-5, 3e-3]}
halving: {metric: validation_loss, rungs: [4, 40], keep: 1/2}
"""


@pytest.mark.night  # by day tests/launch/test_rounds.py pretends to train, and tests/parity continues a run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs_too", [True, False])
def test_a_killed_study_ends_as_one_that_was_not(tmp_path: Path, runs_too: bool):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(STUDY)
    killed = subprocess.Popen(
        [*TITAN_EXP, "sweep", "mine"], cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    )
    study = StudyFolder(tmp_path / "runs" / "mine")
    try:
        while not [run for run in last_runs(study) if len(read_history(run.path)) > 10]:
            assert killed.poll() is None
            time.sleep(0.05)
    finally:
        (os.killpg if runs_too else os.kill)(killed.pid, signal.SIGKILL)
        killed.wait()
    (last,) = last_runs(study)
    assert 4 < len(read_history(last.path)) < 40, "it was killed within the second rung"

    again = titan_exp("sweep", "mine", folder=tmp_path, limit=300)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "rung 2 of 2: the best by validation_loss is lr=3e-3" in again.stdout
    record = study.read()
    assert record is not None
    assert [(point.label, len(study.run(point).read_attempts())) for point in record.points] == [
        *(("lr=1e-5", 1), ("lr=3e-3", 1), ("lr=3e-3 rung=2", 2))
    ]
    idle = titan_exp("sweep", "mine", folder=tmp_path, limit=300)
    assert (idle.returncode, "3 done" in idle.stdout) == (0, True)
    assert [len(study.run(point).read_attempts()) for point in record.points] == [1, 1, 2]

    words = [
        text for text in record.points[1].overrides if not text.startswith(("training.stop_after", "experiment.name"))
    ]
    whole = titan_exp("train", "experiment.name=whole", *words, folder=tmp_path, limit=300)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (folder,) = (tmp_path / "runs" / "whole").iterdir()
    assert [(row["step"], row["loss"], row["lr"]) for row in read_history(last.path)] == [
        (row["step"], row["loss"], row["lr"]) for row in read_history(folder)
    ]


def last_runs(study: StudyFolder) -> list[RunFolder]:
    """Runs of the second rung that exist."""
    return runs_of(study, 2)


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_search_that_dies_alone_is_continued(tmp_path: Path):
    """Only the searching process is killed, in each rung once: the choice is the same, and nothing is trained twice."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(SEARCH)
    study = StudyFolder(tmp_path / "runs" / "mine")
    for rung in (1, 2, 3):
        killed = subprocess.Popen([*TITAN_EXP, "sweep", "mine"], cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            while not [run for run in runs_of(study, rung) if len(read_history(run.path)) > (0, *RUNGS)[rung - 1]]:
                assert killed.poll() is None
                time.sleep(0.02)
        finally:
            killed.kill()
            killed.wait()
    again = titan_exp("sweep", "mine", folder=tmp_path, limit=300)
    assert again.returncode == 0, again.stdout + again.stderr

    (tmp_path / "sweeps" / "calm.yaml").write_text(SEARCH)
    calm = titan_exp("sweep", "calm", folder=tmp_path, limit=300)
    assert calm.returncode == 0, calm.stdout + calm.stderr
    assert rung_lines(calm.stdout) == rung_lines(again.stdout)
    assert len(rung_lines(calm.stdout)) == 3
    record, other = study.read(), StudyFolder(tmp_path / "runs" / "calm").read()
    assert record is not None
    assert other is not None
    assert [point.label for point in record.points] == [point.label for point in other.points]
    for point in record.points:
        steps = [row["step"] for row in read_history(study.run(point).path)]
        assert steps == list(range(1, RUNGS[point.round - 1] + 1)), point.label


RUNGS = (4, 8, 24)
SEARCH = (
    STUDY.partition("axes:")[0].replace("training.steps=40", "training.steps=24").replace("every=40", "every=24")
    + """\
search:
  method: random
  points: 4
  seed: 0
  ranges:
    optimizer.lr: {log_uniform: [1e-5, 1e-2]}
halving: {metric: validation_loss, rungs: [4, 8, 24], keep: 1/2}
"""
)


def rung_lines(said: str) -> list[str]:
    """Choices of a study."""
    return [line for line in said.splitlines() if line.startswith("rung ")]


def runs_of(study: StudyFolder, rung: int) -> list[RunFolder]:
    """Runs of a rung that exist."""
    record = study.read()
    points = [] if record is None else [point for point in record.points if point.round == rung]
    return [study.run(point) for point in points if study.run(point).config.exists()]
