"""A study as a user has it: written, looked at, run for real with three seeds, looked at again."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from tests.journeys.command import titan_exp
from titan_exp.tracking.run_folder.metrics_jsonl import read_last_values
from titan_exp.tracking.run_folder.run_folder import RunFolder

STUDY = """\
question: Does this model learn faster at a higher rate?
held_fixed:
  - model=llama_debug
  - training.seq_len=64
  - training.global_batch_size=4
  - training.steps=20
  - evaluation.every=0
  - tracking.log_every=5
  - checkpoint=none
  - cluster.device=cpu
axes:
  - grid: {optimizer.lr: [3e-4, 3e-3]}
  # Three ranks cannot share four heads: this point is skipped, and said so.
  - grid: {parallelism.tp: [1, 3]}
    when: {optimizer.lr: 3e-3}
seeds: 3
baseline: {optimizer.lr: 3e-4}
metrics: {loss: min}
"""


@pytest.mark.night  # by day tests/launch and tests/cluster run studies
@pytest.mark.timeout(300)
def test_a_study_of_six_runs(tmp_path: Path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "rates.yaml").write_text(STUDY)
    listed = titan_exp("sweep", folder=tmp_path)
    assert "Does this model learn faster" in listed.stdout
    assert "parallelism_degrees" in listed.stdout

    plan = titan_exp("sweep", "rates", "--dry-run", folder=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert "6 to start, 3 skipped." in plan.stdout
    assert "parallelism.tp=3: 4 query heads" in plan.stdout
    assert not (tmp_path / "runs").exists()

    done = titan_exp("sweep", "rates", "--jobs", "2", folder=tmp_path, limit=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"done after step 20 of 20", done.stdout)) == 6

    status = titan_exp("status", "rates", "--json", folder=tmp_path)
    rows = json.loads(status.stdout)
    assert [(row["state"], row["step"], row["steps"]) for row in rows] == [("done", 20, 20)] * 6
    by_rate = {rate: [row["loss"] for row in rows if f"lr={rate}" in row["label"]] for rate in ("3e-4", "3e-3")}
    assert len(set(by_rate["3e-4"])) == 3, "every seed is a run of its own"
    assert max(by_rate["3e-3"]) < min(by_rate["3e-4"])

    again = titan_exp("sweep", "rates", folder=tmp_path)
    assert (again.returncode, again.stdout.count("already done")) == (0, 6)
    table = titan_exp("status", folder=tmp_path)
    assert table.stdout.count("20/20") == 6

    compared = titan_exp("compare", "rates", folder=tmp_path)
    assert compared.returncode == 0, compared.stderr
    assert "2 rows, 6 runs" in compared.stdout
    assert "Does this model learn faster" in compared.stdout
    assert "differs from the baseline (3 seeds, paired)" in " ".join(compared.stdout.split())
    assert compared.stdout.endswith("page: runs/rates/compare.html\n")
    numbers = json.loads(titan_exp("compare", "rates", "--json", "--html=none", folder=tmp_path).stdout)
    lower, higher = numbers["rows"]
    assert (lower["baseline"], lower["seeds"], higher["seeds"]) == (True, 3, 3)
    folders = {row["run_id"]: RunFolder(tmp_path / row["folder"]) for row in rows}
    for row in numbers["rows"]:
        newest = {run["run_id"]: read_last_values(folders[run["run_id"]].metrics)["loss"] for run in row["runs"]}
        assert {run["run_id"]: run["loss"] for run in row["runs"]} == newest
        assert row["loss"] == pytest.approx(statistics.fmean(loss or math.nan for loss in newest.values()))
    assert higher["loss.delta"] == pytest.approx(higher["loss"] - lower["loss"])
    page = (tmp_path / "runs" / "rates" / "compare.html").read_text()
    assert all(run_id in page for run_id in folders)
    assert f"{higher['loss']:.4f}" in page
