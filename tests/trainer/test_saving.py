"""Checkpoints of the trainer: when they are saved, and the log."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import train
from tests.patching import patch
from tests.trainer.test_trainer import run
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import tensor_shapes
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder


def steps(path: Path) -> list[int]:
    return CheckpointFolder(RunFolder(path).checkpoints).complete_steps()


def test_rows_say_how_long_the_last_save_took(tmp_path):
    _, folder = run(tmp_path, "checkpoint.mode=sync", "checkpoint.every=4", "training.steps=6")
    rows = read_metrics(folder.metrics)
    told = [row["step"] for row in rows if "checkpoint_pause" in row]
    assert told == [5], "the row after the one of the step that was saved"
    assert rows[4]["checkpoint_pause"] >= rows[4]["checkpoint_write"] > 0  # type: ignore[operator]  # numbers


def test_rank_0s_clock_is_what_all_ranks_save_by(tmp_path):
    """The clock of every other rank is broken, in both directions; disagreeing ranks would wait for each other."""
    settings = ["checkpoint.every_minutes=1", "checkpoint.every=null", "checkpoint.keep=9", "checkpoint.mode=sync"]
    train(
        tmp_path,
        *settings,
        "training.steps=6",
        "parallelism.dp_shard=3",
        "training.global_batch_size=12",
        mutate=broken_clocks,
    )
    assert steps(tmp_path) == [3, 6]


def broken_clocks() -> None:
    import os

    asked, rank = 0, int(os.environ["RANK"])

    def interval_elapsed(self: Any) -> bool:
        nonlocal asked
        asked += 1
        return {0: asked % 3 == 0, 1: True, 2: False}[rank]

    patch("titan_exp.checkpoint.checkpointer.Checkpointer.interval_elapsed", lambda _: interval_elapsed)


def test_a_weights_only_checkpoint_cannot_be_resumed(tmp_path):
    settings = ["checkpoint.mode=sync", "checkpoint.last=weights", "checkpoint.every=2", "checkpoint.keep=1"]
    run(tmp_path, *settings, "training.steps=4")
    assert steps(tmp_path) == [4]
    keys = tensor_shapes(CheckpointFolder(tmp_path / "checkpoints").path_of(4))
    assert all(key.startswith("model.") or key == "progress" for key in keys)
    finished, _ = run(tmp_path, *settings, "training.steps=4")
    assert finished, "there is nothing left to do"
    with pytest.raises(UserError, match=r"(?s)weights only.*checkpoint\.initial="):
        run(tmp_path, *settings, "training.steps=5")


def test_a_stopped_run_with_weights_alone_at_its_end_is_saved_whole(tmp_path):
    settings = ["checkpoint.mode=sync", "checkpoint.last=weights", "training.steps=4"]
    folder = RunFolder(tmp_path)
    folder.request_stop("a test")
    run(tmp_path, *settings)
    folder.clear_stop()
    finished, _ = run(tmp_path, *settings)
    assert finished
    assert steps(tmp_path) == [1, 4]


def test_changed_options_are_logged_on_resume_and_apply(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="titan_exp")
    settings = ["checkpoint.mode=sync", "checkpoint.every=2"]
    run(tmp_path, *settings, "training.steps=2", "lr_schedule=constant", "lr_schedule.warmup_steps=0")
    assert "changed since" not in caplog.text
    _, folder = run(
        tmp_path,
        *settings,
        "training.steps=4",
        "lr_schedule=constant",
        "lr_schedule.warmup_steps=0",
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.5",
    )
    for line in ("optimizer.lr: 0.002 → 0.001", "training.steps: 2 → 4", "optimizer.weight_decay: 0.1 → 0.5"):
        assert f"\n  {line}" in caplog.text
    assert read_metrics(folder.metrics)[-1]["lr"] == pytest.approx(1e-3)


def test_a_damaged_newest_checkpoint_costs_a_few_steps_and_no_number(tmp_path, caplog):
    settings = ["checkpoint.mode=async", "checkpoint.every=2", "training.steps=6", "checkpoint.keep=3"]
    _, folder = run(tmp_path, *settings)
    rows = [json.dumps([row["loss"], row["grad_norm"]]) for row in read_metrics(folder.metrics)]
    file = CheckpointFolder(folder.checkpoints).path_of(6) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    _, folder = run(tmp_path, *settings)
    assert "step 6 is damaged: __0_0.distcp has" in caplog.text
    assert [json.dumps([row["loss"], row["grad_norm"]]) for row in read_metrics(folder.metrics)] == rows
    assert steps(tmp_path) == [2, 4, 6]


def test_a_runs_own_checkpoint_wins_over_initial_weights(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="titan_exp")
    saving = ["checkpoint.mode=sync", "checkpoint.every=2"]
    run(tmp_path / "first", *saving, "training.steps=2")
    begun = [*saving, f"checkpoint.initial={tmp_path / 'first'}", "experiment.seed=5"]
    _, whole = run(tmp_path / "second", *begun, "training.steps=4", "checkpoint.keep=9")
    assert "weights and buffers from" in caplog.text
    (tmp_path / "second/checkpoints/step-00000004").rename(tmp_path / "gone")
    caplog.clear()
    run(tmp_path / "second", *begun, "training.steps=4")
    assert "continuing after step 2" in caplog.text
    assert "weights and buffers from" not in caplog.text
    _, drawn = run(tmp_path / "third", *saving, "experiment.seed=5", "training.steps=1")
    assert read_metrics(drawn.metrics)[0]["loss"] != read_metrics(whole.metrics)[0]["loss"]
