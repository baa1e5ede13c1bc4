"""Averaged weights: one device's in every layout, in resumed runs, and in what the verbs read."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parity.runs import EVALUATE, PARAGRAPHS, Curve, train
from tests.parity.test_continued import continued
from tests.patching import patch
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.checkpoint.formats.torch_file import DCPTensorReader
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.errors.user_error import UserError
from titan_exp.inference.evaluate import evaluate_command
from titan_exp.tracking.run_folder.run_folder import RunFolder

EMA = ["weight_average=ema", "weight_average.decay=0.7"]
SAVED = ["checkpoint=sync", *EMA, *PARAGRAPHS, *EVALUATE.split(), "evaluation.every=3"]
LOSS, AVERAGED = "validation_loss", "averaged/validation_loss"
EXPERTS = "model=qwen3_moe_debug parallelism.dp_shard=4 parallelism.ep=2"


def averages(run: Path, step: int) -> dict[str, Tensor]:
    reader = DCPTensorReader(CheckpointFolder(RunFolder(run).checkpoints).path_of(step), averaged=True)
    assert reader.has_averages
    return {name: reader.read(name) for name in reader.shapes}


def assert_same_averages(found: Path, curve: Curve, expected: Path, other: Curve) -> None:
    for name in (LOSS, AVERAGED):
        losses = [row[name] for row in other.rows if row.get(name) is not None]
        assert [row[name] for row in curve.rows if row.get(name) is not None] == pytest.approx(losses, rel=2e-6)
        assert len(losses) == 2
    tensors = averages(expected, 6)
    assert any(not torch.equal(tensors[name], weight) for name, weight in other.weights.items())
    for name, value in averages(found, 6).items():
        torch.testing.assert_close(value, tensors[name], atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.night)
        for layout in (
            "parallelism.tp=2 parallelism.dp_shard=2 parallelism.reshard_after_forward=never",
            "parallelism=hsdp training.micro_batch_size=1",
            "parallelism=ddp optimizer=muon",
            "parallelism.pp=2 parallelism.dp_shard=2 model.tied_embeddings=true",
            "parallelism.cpu_offload=true parallelism.dp_shard=2",
            EXPERTS,
            "model=qwen3_moe_debug parallelism.dp_shard=2 parallelism.tp=2 parallelism.etp=2",
        )
    ],
)
def test_averages_are_those_of_one_device(tmp_path: Path, layout: str):
    words = [word for word in layout.split() if not word.startswith(("parallelism", "training.micro"))]
    one, many = train(tmp_path / "one", *SAVED, *words), train(tmp_path / "many", *SAVED, *layout.split())
    assert_same_averages(tmp_path / "many", many, tmp_path / "one", one)


@pytest.mark.night
@pytest.mark.parametrize("mode", ["ema", "tail"])
@pytest.mark.parametrize(("before", "after"), [("parallelism.dp_shard=2", "parallelism.dp_shard=2"), (EXPERTS, "")])
def test_a_resumed_run_continues_its_average(tmp_path: Path, mode: str, before: str, after: str):
    own = [f"weight_average={mode}", "weight_average.steps=7", "training.seq_len=32"]
    model = [word for word in before.split() if word.startswith("model")]
    continued(tmp_path, [*own, *before.split()], [*own, *model, *after.split()])
    found, expected = averages(tmp_path / "changed", 10), averages(tmp_path / "whole", 10)
    tolerance = (0, 0) if before == after else (2e-5, 1e-4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance[0], rtol=tolerance[1])


def averaging_starts_again() -> None:
    patch("titan_exp.optim.weight_average.WeightAverage.restore", lambda _: lambda self, saved, step: None)


def gathered_weights_stay() -> None:
    patch("titan_exp.trainer.train_state.free_gathered", lambda _: lambda parts: None)


@pytest.mark.night
def test_a_forgotten_count_is_noticed(tmp_path: Path):
    own = [*EMA, "training.seq_len=32"]
    continued(tmp_path, own, own, mutate=averaging_starts_again)
    found, expected = averages(tmp_path / "changed", 10), averages(tmp_path / "whole", 10)
    assert any(not torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.night
def test_stale_gathered_weights_are_noticed(tmp_path: Path):
    layout = ["parallelism.dp_shard=2", "parallelism.reshard_after_forward=never"]
    one, many = train(tmp_path / "one", *SAVED), train(tmp_path / "many", *SAVED, *layout, mutate=gathered_weights_stay)
    with pytest.raises(AssertionError):
        assert_same_averages(tmp_path / "many", many, tmp_path / "one", one)


@pytest.mark.night
def test_verbs_read_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    curve = train(run, *SAVED, "checkpoint.last=weights")
    assert evaluate_command([str(run), "--averaged"]) == 0
    assert "averaged weights" in (printed := capsys.readouterr().out)
    assert f"{curve.rows[-1][AVERAGED]:.4f}" in printed
    assert f"{curve.rows[-1][AVERAGED]:.4f}" != f"{curve.rows[-1][LOSS]:.4f}"
    assert convert_command([str(run), str(tmp_path / "out"), "--averaged", "format=dcp"]) == 0
    converted, expected = open_checkpoint(tmp_path / "out").parameters, averages(run, 6)
    assert all(torch.equal(converted.read(name), value) for name, value in expected.items())
    with pytest.raises(UserError, match="has no averaged weights"):
        convert_command([str(tmp_path / "out"), str(tmp_path / "again"), "--averaged"])
