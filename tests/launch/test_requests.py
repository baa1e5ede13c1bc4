"""Requests to a scheduler: what a submission asks in total, how to ask for less, and its job scripts."""

from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.cli.main import main
from titan_exp.launch.run_plan import plan_run
from titan_exp.plan.gate import fits_unsharded

SMALL = ["model=llama_debug", "experiment.name=x", "training.global_batch_size=16", "cluster=slurm_h100"]
SMALL += ["cluster.time_limit=3:00:00"]
SWEPT = ["train", "-m", *SMALL, "optimizer.lr=1e-3,2e-3", "--dry-run"]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command without SLURM in an empty folder; returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    def run(*words: str) -> str:
        assert main(list(words)) == 0
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out

    return run


def test_a_dry_run_of_a_sweep_has_a_script_of_each_request(said):
    text = said(*SWEPT, "parallelism.dp_shard=1,2,16")
    scripts = text.split("#!/bin/bash")[1:]
    sizes = [(1, 1), (1, 2), (2, 8)]
    for script, (nodes, tasks) in zip(scripts, sizes, strict=True):
        assert f"#SBATCH --nodes={nodes}\n" in script
        assert f"#SBATCH --gpus-per-node=h100:{tasks}\n" in script
    begin = "Job script of optimizer.lr=0.001 parallelism.dp_shard=2; 1 more ask for the same:\n\n#!/bin/bash"
    assert begin in text
    assert text.rindex("\npoint ") > text.rindex("#!/bin/bash"), "the table is what a terminal shows"
    total = "2 × 1 GPU × 3:00:00 + 2 × 2 GPUs × 3:00:00 + 2 × 16 GPUs × 3:00:00 = 114.0 GPU-hours."
    assert f"\n6 to start.\nThis asks for {total}\n" in text
    # The script that `train` shows of this run is the same one.
    alone = said("train", *SMALL, "optimizer.lr=1e-3", "parallelism.dp_shard=16", "--dry-run")
    assert alone.split("#!/bin/bash")[1].rstrip() in scripts[2]


def test_the_remedy_of_a_small_run_that_fills_a_node_asks_for_less(said):
    remedy = "parallelism.dp_shard=1 asks for no more, where -1 filled the nodes with 8 shards.\n"
    text = said(*SWEPT)
    assert "This asks for 2 × 8 GPUs × 3:00:00 = 48.0 GPU-hours.\n" in text
    assert f"By an upper bound of their memory, 2 of these runs fit on 1 GPU each, too: {remedy}" in text
    text = said("train", *SMALL, "--dry-run")
    bound = "By an upper bound of its memory, this run fits"
    assert f"This asks for 8 GPUs × 3:00:00 = 24.0 GPU-hours.\n{bound} on 1 GPU, too: {remedy}" in text
    text = said("train", *SMALL, "--dry-run", "parallelism.tp=2", "cluster.time_limit=null")
    assert f"This asks for 8 GPUs × the time limit of the site.\n{bound} on 2 GPUs, too: " in text
    for words in (["parallelism.dp_shard=1"], ["parallelism.dp_shard=8"]):
        text = said("train", *SMALL, "--dry-run", *words)
        gpus = words[0][-1]
        assert f"This asks for {gpus} GPU{'s' * (gpus > '1')} × 3:00:00 = {3 * int(gpus)}.0 GPU-hours.\n" in text
        assert "too: " not in text, "asked for in so many words"
    for words in (["cluster=local"], ["cluster=slurm", "cluster.device=cpu"]):
        assert "asks for" not in said("train", *SMALL[:3], *words, "--dry-run")


def test_a_registered_question_says_what_all_pairs_ask_for(said):
    words = ["cluster=slurm_h100", "cluster.time_limit=3:00:00", "parallelism.dp_shard=1"]
    text = said("sweep", "decay_shape", *words, "--dry-run")
    assert "This asks for 6 × 1 GPU × 3:00:00 = 18.0 GPU-hours.\n" in text
    whole = "This look has 6 runs. All 8 pairs together have 16 runs, which ask for 48.0 GPU-hours.\n"
    assert whole in text


def test_a_large_model_is_not_told_to_use_one_gpu(tmp_path: Path):
    words = ["cluster=slurm_h100", f"paths.runs={tmp_path}", "experiment.name=x", "training.seq_len=2048"]
    assert fits_unsharded(plan_run(experiment("model=llama_debug", *words)).experiment, tmp_path)
    assert not fits_unsharded(plan_run(experiment("model=llama3_8b", *words)).experiment, tmp_path)
