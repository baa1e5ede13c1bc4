"""Tiny Llamas of every published kind, and their exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.models.shapes import TINY, real_model
from titan_exp.checkpoint.formats.export_weights import ExportOptions, export_weights
from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.checkpoint.formats.torch_file import TorchFileReader
from titan_exp.models.llama import Config
from titan_exp.models.spec.rope import RopeConfig

SHAPE = replace(TINY, ffn_dim=128)
"""Widths that two tensor-parallel ranks can share."""

KINDS: dict[str, dict[str, Any]] = {
    "llama2": {"kv_heads": 4, "rope": RopeConfig(10000.0, "none", 1.0, 1.0, 4.0, 128)},
    "llama3": {"kv_heads": 2, "rope": RopeConfig(500000.0, "none", 1.0, 1.0, 4.0, 128)},
    "llama3_1": {"kv_heads": 2, "rope": RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 32)},
    "llama3_2": {"kv_heads": 1, "tied_embeddings": True, "rope": RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 32)},
}
"""Differences from `SHAPE`; the original context is short so that RoPE scaling shows in a short sequence."""


def kind(name: str) -> Config:
    return replace(SHAPE, **KINDS[name])


def weights(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        key: value.detach()
        for key, value in real_model(seed, seq_len=128, ffn_dim=128, **KINDS[name]).state_dict().items()
    }


def in_memory(name: str, **changes: Any) -> OpenCheckpoint:
    """A source in memory, without a file."""
    special = {"bos_token_id": 1, "eos_token_id": 1}
    source = OpenCheckpoint(Path("memory"), "torch", kind(name), TorchFileReader(weights(name)), None, special)
    return replace(source, **changes)


def exported(name: str, form: str, target: Path, **settings: Any) -> Path:
    export_weights(in_memory(name), target, ExportOptions(form, **settings))
    return target


def assert_holds(source: OpenCheckpoint, name: str, dtype: torch.dtype = torch.float32) -> None:
    """Assert that the weights are bitwise those of a kind."""
    expected = weights(name)
    assert set(source.parameters.shapes) == set(expected)
    for key, value in expected.items():
        assert source.parameters.dtype(key) == dtype
        assert torch.equal(source.parameters.read(key), value.to(dtype)), key
