"""Round trip of a folder of transformers: read, computed and written by us, it comes back byte for byte."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.trainer.restore import load_source


def assert_comes_back(theirs: Any, shape: ModelConfig, ids: Tensor, folder: Path, *, file_bytes: float = 5e9) -> None:
    """Save a model of transformers in files of some bytes, and hold what we read, compute and write against it."""
    theirs.save_pretrained(folder / "theirs", max_shard_size=int(file_bytes))
    source = open_checkpoint(folder / "theirs")
    assert source.model == replace(shape, name="theirs")
    ours = load_source(source, torch.device("cpu"), seq_len=64)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    export_weights(source, folder / "ours", ExportOptions("huggingface", file_bytes=file_bytes))
    found, expected = (tensors(folder / side) for side in ("ours", "theirs"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert open_checkpoint(folder / "ours").model == replace(source.model, name="ours")


def tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of all files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
