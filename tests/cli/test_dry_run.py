"""`titan-exp train --dry-run` of one run: what would start, and nothing started."""

from pathlib import Path

import pytest

from titan_exp.cli.main import main

SMALL = ["train", "--dry-run", "model=llama_debug", "+experiment=smoke", "experiment.name=x", "plan.gate=off"]


def test_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"would start {tmp_path}/runs/x/")
    assert list(tmp_path.iterdir()) == []
    assert main([*SMALL, "training.steps=0.5"]) == 2  # it is checked as a run is


def test_a_script_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """SLURM need not be installed here, and credentials of its jobs are not read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*SMALL, "cluster=slurm", "cluster.gpus_per_node=8", "parallelism.tp=2", "parallelism.dp_shard=8"]) == 0
    said = capsys.readouterr().out
    assert (
        "compile=auto compiles blocks, since this run is on a GPU (compile=none runs eagerly, for debugging)\n" in said
    )
    assert "2 nodes with 8 processes each" in said
    assert "\n\n#!/bin/bash\n" in said
    assert "#SBATCH --gpus-per-node=8\n" in said
    assert list(tmp_path.iterdir()) == []
