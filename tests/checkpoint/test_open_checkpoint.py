"""Open checkpoints of real runs, of one rank and of several."""

from pathlib import Path

import pytest
import torch

from tests.parity.runs import train
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.cli.convert import run as convert_command
from titan_exp.config.errors.user_error import UserError

SAVED = ("checkpoint.mode=sync", "checkpoint.every=5", "training.steps=10")


@pytest.mark.parametrize(
    "layout",
    [(), pytest.param(("parallelism.dp_shard=2", "parallelism.tp=2"), marks=pytest.mark.night)],
    ids=["one", "four"],
)
def test_export_is_bitwise(layout: tuple[str, ...], tmp_path: Path):
    trained = train(tmp_path / "run", *SAVED, *layout)
    source = open_checkpoint(tmp_path / "run")
    assert (source.format, source.path.name, source.tokenizer) == ("dcp", "step-00000010", "bytes")
    assert convert_command([str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    found = open_checkpoint(tmp_path / "export").parameters
    assert set(found.shapes) == set(trained.weights)
    for name, value in trained.weights.items():
        assert torch.equal(found.read(name), value), name


def test_one_of_several_checkpoints(tmp_path: Path):
    train(tmp_path / "run", *SAVED)
    assert open_checkpoint(tmp_path / "run", 5).path.name == "step-00000005"
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000005").model.name == "llama-debug"
    with pytest.raises(UserError, match="checkpoints of steps 5, 10"):
        open_checkpoint(tmp_path / "run", 7)
    with pytest.raises(UserError, match="Use one of them, or the run"):
        open_checkpoint(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "step-00000005").rename(tmp_path / "astray")
    with pytest.raises(UserError, match="without a description of its model"):
        open_checkpoint(tmp_path / "astray")
    with pytest.raises(UserError, match="checkpoints of steps 10"):
        open_checkpoint(tmp_path / "run", 5)
