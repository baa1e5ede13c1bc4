"""A study on a real SLURM: launched, inspected, repaired, changed, cancelled, compared."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.submitting import Submitting
from tests.journeys.command import TITAN_EXP
from titan_exp.cli.main import main
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder

STUDY = """\
question: Which rate learns fastest?
held_fixed:
  - model=llama_debug
  - training.seq_len=32
  - training.global_batch_size=2
  - training.steps=4
  - evaluation.every=0
  - tracking.log_every=1
  - checkpoint=none
  - cluster=slurm
  - cluster.device=cpu
  - cluster.threads_per_process=1
axes:
  - grid: {{optimizer.lr: {rates}}}
seeds: 2
baseline: {{optimizer.lr: 1e-3}}
metrics: {{loss: min}}
"""
LOWER = [f"lr=1e-3 seed={seed}" for seed in (0, 1)]
HIGHER = [f"lr=3e-3 seed={seed}" for seed in (0, 1)]


class Typed:
    """The command line, typed in a folder that holds the study `rates`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        """Type a command; returns what it prints."""
        self.capsys.readouterr()
        assert main(list(words)) == code, self.capsys.readouterr()
        said = self.capsys.readouterr()
        assert all(line.startswith("page: ") for line in said.err.splitlines()), said.err
        return said.out

    def rows(self) -> dict[str, dict[str, Any]]:
        """What status says of every run, by its label."""
        return {row["label"]: row for row in json.loads(self("status", "rates", "--json"))}

    def states(self) -> dict[str, str]:
        """The state of every run that the study holds, by its label."""
        return {label: row["state"] for label, row in self.rows().items() if not row["removed"]}


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    monkeypatch.chdir(tmp_path)
    Path("sweeps").mkdir()
    return Typed(capsys)


def write(*rates: str) -> None:
    Path("sweeps/rates.yaml").write_text(STUDY.format(rates=f"[{', '.join(rates)}]"))


@pytest.mark.night
@pytest.mark.timeout(300)
def test_study_from_launch_to_table(cluster: Submitting, stand_in: Callable[[str], None], typed: Typed):
    stand_in("train_second_time")

    def over() -> bool:
        return not cluster.slurm.queue() and not {"queued", "running"} & set(typed.states().values())

    def wait_for_the_end() -> None:
        cluster.wait_until(over, lambda: f"{typed.rows()}\n{cluster.slurm.state()}")

    write("1e-3", "3e-3")
    said = typed("sweep", "rates")
    assert "4 submitted" in said
    assert "titan-exp status rates" in said
    wait_for_the_end()
    assert typed.states() == dict.fromkeys([*LOWER, *HIGHER], "done") | {LOWER[1]: "failed"}
    assert typed.rows()[LOWER[1]]["reason"] == "rank 0: RuntimeError: out of luck"
    assert "RuntimeError: out of luck" in typed("logs", "rates/lr=1e-3,seed=1")

    retried = typed("retry", "rates")
    assert "Left alone: 3 done." in retried
    assert f"{LOWER[1]}: submitted, job " in retried
    wait_for_the_end()
    assert typed.states() == dict.fromkeys([*LOWER, *HIGHER], "done")
    assert "4 done" in typed("sweep", "rates")
    assert attempts(typed) == [1, 2, 1, 1]

    # Two points more, held so that they wait; one is cancelled by name, the other is taken out of the file.
    write("1e-3", "3e-3", "1e-2")
    assert "2 submitted" in typed("sweep", "rates", "cluster.sbatch_args=['--hold']")
    assert [typed.states()[f"lr=1e-2 seed={seed}"] for seed in (0, 1)] == ["queued", "queued"]
    assert "taken out of the queue" in typed("cancel", "rates/lr=1e-2,seed=0")
    assert list(cluster.slurm.queue().values()) == ["PENDING"]
    assert "No run failed or was lost." in typed("retry", "rates")
    write("1e-3", "3e-3")
    assert "To cancel them, add --prune:\n  lr=1e-2 seed=1" in typed("sweep", "rates", "--dry-run")
    said = typed("sweep", "rates", "--prune", "--yes")
    assert "lr=1e-2 seed=1: job " in said
    assert "4 done" in said
    assert cluster.slurm.queue() == {}
    assert "submitted" not in typed("sweep", "rates")
    assert cluster.slurm.queue() == {}

    comparison = json.loads(typed("compare", "rates", "--json"))
    assert comparison["baseline"] == "lr=0.001"
    assert [row["label"] for row in comparison["rows"]] == ["lr=0.001", "lr=0.003"]
    for row in comparison["rows"]:
        assert [run["loss"] for run in row["runs"]] == [
            read_metrics(Path(run["source"]) / "metrics.jsonl")[-1]["loss"] for run in row["runs"]
        ]
    table = typed("compare", "rates")
    assert "2 rows, 4 runs" in table
    assert "page: runs/rates/compare.html" in table
    assert {row["state"] for row in typed.rows().values() if row["removed"]} == {"preempted"}


HALVED = (
    STUDY.format(rates="[1e-5, 3e-3, 1e-3]")
    .replace("evaluation.every=0", "evaluation.every=4\n  - data.validation_documents=2")
    .replace("checkpoint=none", "checkpoint.every=2")
    .replace("seeds: 2\n", "halving: {metric: validation_loss, rungs: [2, 4], keep: 1/3}\n")
    .replace("baseline: {optimizer.lr: 1e-3}\nmetrics: {loss: min}\n", "")
)


@pytest.mark.night
@pytest.mark.timeout(300)
def test_halving_whose_submission_is_killed(cluster: Submitting, typed: Typed):
    """Each command submits one rung; killed behind the first submission, it is repeated and trains nothing twice."""
    Path("sweeps/rates.yaml").write_text(HALVED)
    killed = subprocess.Popen([*TITAN_EXP, "sweep", "rates"], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        cluster.wait_until(lambda: bool(cluster.slurm.queue()) or killed.poll() is not None, cluster.slurm.state)
    finally:
        if killed.poll() is None:
            os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()

    def wait_for_the_end() -> None:
        cluster.wait_until(
            lambda: not cluster.slurm.queue() and not {"queued", "running"} & set(typed.states().values()),
            lambda: f"{typed.rows()}\n{cluster.slurm.state()}",
        )

    typed("sweep", "rates")
    wait_for_the_end()
    first = [f"lr={rate}" for rate in ("1e-5", "3e-3", "1e-3")]
    assert typed.states() == dict.fromkeys(first, "done")
    said = typed("sweep", "rates")
    assert "1 of 3 continues, by validation_loss: lr=3e-3" in said
    assert "1 submitted" in said
    wait_for_the_end()
    assert "rung 2 of 2: the best by validation_loss is lr=3e-3" in typed("sweep", "rates")
    assert typed.states() == dict.fromkeys([*first, "lr=3e-3 rung=2"], "done")
    assert attempts(typed) == [1, 1, 1, 1]
    assert cluster.slurm.queue() == {}


def attempts(typed: Typed) -> list[int]:
    """How many starts each run has had."""
    return [len(RunFolder(row["folder"]).read_attempts()) for row in typed.rows().values()]
