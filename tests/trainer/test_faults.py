"""Whole runs on full disks, and with damaged or missing initial weights."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import NO_MOUNTS, can_mount, small_disk
from tests.parity.runs import PARAGRAPHS, train
from tests.patching import patch
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.errors.user_error import UserError

SAVING = [*PARAGRAPHS, "checkpoint.mode=sync", "checkpoint.every=2", "training.steps=8"]


@pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS)
def test_a_disk_that_is_full_for_some_steps_costs_neither_run_nor_row(tmp_path):
    undisturbed = train(tmp_path / "undisturbed", *SAVING)
    with small_disk(tmp_path / "disk", 20 * 2**20) as disk:
        run = disk / "run"
        found = train(run, *SAVING, "checkpoint.keep=9", mutate=fills_its_disk_from_step_3_to_6)
        assert CheckpointFolder(run / "checkpoints").complete_steps() == [2, 8]
    assert [row["step"] for row in found.rows] == list(range(1, 9))
    assert (found.loss, found.grad_norm) == (undisturbed.loss, undisturbed.grad_norm)
    assert all(torch.equal(found.weights[name], weight) for name, weight in undisturbed.weights.items())


def fills_its_disk_from_step_3_to_6() -> None:
    from tests.faults import fill

    def make(step: Any) -> Any:
        def on_a_disk_that_fills_up(self: Any) -> bool:
            filler = self.folder.path / "filler"
            if self.step == 2:
                assert fill(self.folder.path) == filler
            elif self.step == 6:
                filler.unlink()
            # Every heartbeat is written, and fails.
            self.folder._last_heartbeat = -1e9
            return step(self)

        return on_a_disk_that_fills_up

    patch("titan_exp.trainer.trainer.Trainer._one_step", make)


def test_a_hugging_face_folder_that_was_not_fetched_whole_is_refused(tmp_path):
    train(tmp_path / "first", *SAVING)
    assert convert_command([str(tmp_path / "first"), str(tmp_path / "export"), "file_gb=0.0005"]) == 0
    file = sorted((tmp_path / "export").glob("*.safetensors"))[-1]
    os.truncate(file, file.stat().st_size - 100)
    begun = [*PARAGRAPHS, f"checkpoint.initial={tmp_path / 'export'}", "training.steps=1"]
    with pytest.raises(UserError, match=r"export is not complete: .* bytes instead of"):
        train(tmp_path / "second", *begun, "parallelism.pp=2")


def test_weights_that_are_gone_stop_a_new_run_and_no_other(tmp_path, monkeypatch):
    train(tmp_path / "first", *SAVING)
    begun = [*PARAGRAPHS, f"checkpoint.initial={tmp_path / 'first'}", "checkpoint.mode=sync"]
    train(tmp_path / "second", *begun, "training.steps=2")
    (tmp_path / "first").rename(tmp_path / "gone")
    # Whether they are there is asked where the run is launched, which knows its folder.
    monkeypatch.setattr("titan_exp.rules.checkpoint.BEGINNING_RULES", ())
    assert [row["step"] for row in train(tmp_path / "second", *begun, "training.steps=3").rows] == [1, 2, 3]
    with pytest.raises(AssertionError, match=r"UserError: checkpoint.initial=.*: there is no complete checkpoint"):
        train(tmp_path / "third", *begun, "training.steps=2")


@pytest.mark.parametrize("way", ["continued", pytest.param("initial", marks=pytest.mark.night)])
def test_any_layout_begins_bitwise_with_a_seed_checkpoint(tmp_path: Path, way: str):
    """Written on one process, before the first step."""
    train(tmp_path / "seed", *PARAGRAPHS, "training.steps=0", "checkpoint.mode=sync")
    folder = CheckpointFolder(tmp_path / "seed/checkpoints")
    assert folder.complete_steps() == [0]
    layout = [*PARAGRAPHS, "training.steps=3", "parallelism.dp_shard=2", "parallelism.pp=2"]
    drawn = train(tmp_path / "drawn", *layout)
    if way == "continued":
        shutil.copytree(folder.path_of(0), tmp_path / "begun/checkpoints/step-00000000")
        layout += ["checkpoint.mode=sync"]
    else:
        layout += [f"checkpoint.initial={tmp_path / 'seed'}"]
    begun = train(tmp_path / "begun", *layout)
    assert (begun.loss, begun.grad_norm) == (drawn.loss, drawn.grad_norm)
    assert all(torch.equal(begun.weights[name], weight) for name, weight in drawn.weights.items())


@pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS)
def test_a_disk_that_stays_full_ends_the_run_with_an_error_and_it_resumes(tmp_path):
    undisturbed = train(tmp_path / "undisturbed", *SAVING)
    with small_disk(tmp_path / "disk", 20 * 2**20) as disk:
        with pytest.raises(AssertionError, match="UserError: We could not save the state after step 8"):
            train(disk / "run", *SAVING, mutate=fills_its_disk_after_step_3)
        (disk / "run/filler").unlink()
        found = train(disk / "run", *SAVING)
    assert [row["step"] for row in found.rows] == list(range(1, 9))
    assert (found.loss, found.grad_norm) == (undisturbed.loss, undisturbed.grad_norm)


def fills_its_disk_after_step_3() -> None:
    from tests.faults import fill

    def make(step: Any) -> Any:
        def on_a_disk_that_fills_up(self: Any) -> bool:
            if self.step == 3:
                fill(self.folder.path)
            return step(self)

        return on_a_disk_that_fills_up

    patch("titan_exp.trainer.trainer.Trainer._one_step", make)
