"""Planned memory beside torch's on a stub device: its layouts, and its words where torch is built without CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.memory import LAYOUTS, experiment_of, rank_and_overrides
from titan_exp.plan.prediction import check_supported


@pytest.mark.night
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_can_be_planned(name: str):
    rank, overrides = rank_and_overrides(LAYOUTS[name])
    experiment = experiment_of(overrides, tiny=False)
    check_supported(experiment)
    assert rank < experiment.parallelism.pp


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build without CUDA")
def test_a_build_without_cuda_is_told_what_to_type():
    command = [sys.executable, "-m", "benchmarks", "stub-gpu", "true"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make stub-gpu installs one" in done.stderr
