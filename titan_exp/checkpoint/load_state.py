"""Loading of a checkpoint's training state into a model and an optimizer, in any layout."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_exp.checkpoint.dcp.storage_reader import load_into, require_stored, tensor_entries, tensor_shapes
from titan_exp.checkpoint.optimizer_state import (
    OPTIMIZER_PREFIX,
    VALUES_PREFIX,
    SavedTensor,
    is_optional,
    optimizer_state_dict,
    prepare_optimizer_state,
)
from titan_exp.checkpoint.state_dict import (
    DATA_PREFIX,
    PROGRESS_KEY,
    WEIGHTS_ONLY_KEY,
    decode_json,
    model_state_dict,
    sync_tied_state,
)


@dataclass(frozen=True)
class RestoredState:
    """Non-tensor state of a checkpoint."""

    progress: dict[str, Any]
    data: dict[str, Any]
    """Data-loader state of every virtual shard."""


def read_progress(path: Path) -> dict[str, Any]:
    """Progress of a checkpoint: step, tokens, configuration."""
    return read_json_entries(path, tensor_shapes(path), PROGRESS_KEY)[PROGRESS_KEY]


def load_state(
    path: Path, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, keeps: Collection[str] = ()
) -> RestoredState:
    """Load a verified checkpoint, of optional optimizer state what this run `keeps` by name; collective if a process
    group exists."""
    shapes, progress = tensor_shapes(path), read_progress(path)
    # Weights first: an optimizer may derive its initial state from them.
    load_into(path, model_state_dict(parts))
    data: dict[str, Any] = {}
    if not progress.get(WEIGHTS_ONLY_KEY):
        # Before its first step an optimizer has no state, and none is saved.
        if any(key.startswith(OPTIMIZER_PREFIX) for key in shapes):
            load_optimizer_state(path, parts, optimizer, keeps=keeps)
        entries = read_json_entries(path, shapes, DATA_PREFIX)
        data = {key.removeprefix(DATA_PREFIX): state for key, state in entries.items()}
    sync_tied_state(parts, optimizer)
    return RestoredState(progress, data)


def load_optimizer_state(
    path: Path,
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    prefix: str = "",
    *,
    keeps: Collection[str] = (),
) -> None:
    """Load the optimizer's state of a checkpoint, whose keys have a `prefix`; collective."""
    entries, of_values = tensor_entries(path), f"{prefix}{VALUES_PREFIX}"
    saved = {
        key.removeprefix(prefix): SavedTensor(entry.size, entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(f"{prefix}{OPTIMIZER_PREFIX}")
    }
    require_stored(path, {key: tensor.shape.numel() * tensor.dtype.itemsize for key, tensor in saved.items()})
    values = read_json_entries(path, tensor_shapes(path), of_values)
    values = {key.removeprefix(of_values): value for key, value in values.items()}
    prepare_optimizer_state(parts, optimizer, saved, values, keeps=keeps)
    state = optimizer_state_dict(parts, optimizer).items()
    load_into(path, {f"{prefix}{key}": value for key, value in state if key in saved or not is_optional(key)})


def read_json_entries(path: Path, shapes: Mapping[str, torch.Size], prefix: str) -> dict[str, Any]:
    """Decode the JSON entries of a checkpoint with a key prefix."""
    wanted = {key: shape for key, shape in shapes.items() if key.startswith(prefix)}
    require_stored(path, {key: shape.numel() for key, shape in wanted.items()})
    entries = {key: torch.empty(shape, dtype=torch.uint8) for key, shape in wanted.items()}
    load_into(path, entries)
    return {key: decode_json(entry) for key, entry in entries.items()}
