"""A run stopped in one layout and continued in another: the curve goes on."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.runs import EVALUATE, PARAGRAPHS, Curve, train
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.tracking.run_folder.run_folder import RunFolder

SAVING = ["training.steps=10", "checkpoint.mode=sync", "checkpoint.every=5", "checkpoint.keep=5"]
FSDP4 = ["parallelism.dp_shard=4"]
HSDP = ["parallelism=hsdp", "training.micro_batch_size=1"]
FSDP2 = ["parallelism.dp_shard=2"]
DDP = ["parallelism=ddp"]
TWO = ["parallelism.dp_shard=2", "training.global_batch_size=12"]
THREE = ["parallelism.dp_shard=3", "training.global_batch_size=12"]
"""Three ranks, which read 64 virtual shards together."""


def continued(
    tmp_path: Path, before: list[str], after: list[str], mutate: Callable[[], None] | None = None
) -> tuple[Curve, Curve]:
    """A whole run in layout `before`, and one that goes over to `after` half way, with a mutation."""
    whole = train(tmp_path / "whole", *SAVING, *before)
    folder = RunFolder(tmp_path / "changed")
    checkpoints = CheckpointFolder(RunFolder(tmp_path / "whole").checkpoints)
    assert checkpoints.complete_steps() == [5, 10]
    shutil.copytree(checkpoints.path_of(5), CheckpointFolder(folder.checkpoints).path_of(5))
    return whole, train(tmp_path / "changed", *SAVING, *after, mutate=mutate)


def assert_continues(whole: Curve, changed: Curve) -> None:
    """The second half of a run is what it would have been, and no sample is lost or repeated."""
    assert [row["step"] for row in changed.rows] == [6, 7, 8, 9, 10]
    assert [row["tokens"] for row in changed.rows] == [row["tokens"] for row in whole.rows[5:]]
    assert changed.loss == pytest.approx(whole.loss[5:], rel=2e-6)
    assert changed.grad_norm == pytest.approx(whole.grad_norm[5:], rel=2e-5)
    for name, weight in whole.weights.items():
        torch.testing.assert_close(changed.weights[name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("before", "after"), [(FSDP4, []), ([], HSDP), (HSDP, FSDP4), (DDP, FSDP2), (TWO, THREE)])
def test_the_curve_continues(tmp_path, before, after):
    whole, changed = continued(tmp_path, before, after)
    assert_continues(whole, changed)


@pytest.mark.night
def test_in_the_same_layout_it_is_bitwise(tmp_path):
    whole, changed = continued(tmp_path, FSDP4, FSDP4)
    assert changed.loss == whole.loss[5:]
    assert changed.grad_norm == whole.grad_norm[5:]
    assert all(torch.equal(changed.weights[name], weight) for name, weight in whole.weights.items())


def stopped_early(tmp_path: Path, mutate: Callable[[], None] | None = None) -> tuple[Curve, Curve, Curve]:
    """A whole run, one that `training.stop_after` ends half way, and its continuation."""
    words = ["training.steps=10", "checkpoint.mode=sync", "lr_schedule=cosine", "lr_schedule.warmup_steps=2"]
    words += [*PARAGRAPHS, *EVALUATE.split(), "evaluation.every=10"]
    whole = train(tmp_path / "whole", *words)
    half = train(tmp_path / "half", *words, "training.stop_after=5", mutate=mutate)
    return whole, half, train(tmp_path / "rest", *words, f"checkpoint.continue_from={tmp_path / 'half'}")


def assert_one_run(whole: Curve, half: Curve, rest: Curve) -> None:
    """Both halves have the learning rates and the numbers of the whole run, to the bit."""
    assert [row["lr"] for row in (*half.rows, *rest.rows)] == [row["lr"] for row in whole.rows]
    assert half.loss + rest.loss == whole.loss
    assert [row["step"] for row in half.rows if row.get("validation_loss")] == [5], "the last step is evaluated"
    assert all(torch.equal(rest.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.night
def test_a_run_that_stops_early_and_its_continuation_are_one_run(tmp_path):
    assert_one_run(*stopped_early(tmp_path))
