"""benchmarks/versus_torchtitan.py: its smoke run, its words where it cannot run, and its cases as configurations."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.composing import give_gpus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "versus_torchtitan.py"
sys.path.insert(0, str(BENCHMARKS))
versus: Any = importlib.import_module("versus_torchtitan")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=200, check=False, env=environment
    )


@pytest.mark.night  # the benchmark itself; by day its parts
def test_the_smoke_run_trains_both_sides_from_the_same_weights():
    done = run("--smoke")
    assert done.returncode == 0, done.stderr
    assert "not torchtitan; these rates mean nothing" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| tiny")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert float(cells[3]) > 0
    assert float(cells[-1]) < 1e-5


def test_what_is_missing_is_said():
    done = run("--case", "1b_bf16_compile")
    assert done.returncode == 2
    assert "torch finds no CUDA GPU here" in done.stderr
    assert "--smoke" in done.stderr


@pytest.mark.parametrize("name", [name for name, case in versus.CASES.items() if not case.missing])
def test_every_case_is_a_run_that_may_start(name: str, monkeypatch: pytest.MonkeyPatch):
    give_gpus(monkeypatch, 1)
    job = versus.Job(name, False, versus.WARMUP, versus.TIMED, None, "bytes")
    experiment = job.experiment()
    shape = job.what.peer_model
    assert (experiment.model.dim, experiment.model.layers) == (shape["dim"], shape["n_layers"])
    hidden = int(shape["ffn_dim_multiplier"] * int(2 * 4 * shape["dim"] / 3))
    assert experiment.model.ffn_dim == -(-hidden // shape["multiple_of"]) * shape["multiple_of"]
    words = versus.peer_options(dataclasses.replace(job, weights="weights"), "dump")
    assert len({word.partition("=")[0] for word in words}) == len(words), "an option is given twice"
