"""Loading of a checkpoint into a run, and of initial weights."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    MODEL_PREFIX,
    PROGRESS_KEY,
    WEIGHTS_ONLY_KEY,
    decode_json,
    is_training_state,
    model_state_dict,
    sync_tied_state,
    sync_tied_weights,
)
from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.rules.weights import weight_pattern
from titan_exp.tracking.logging import get_logger


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
    """Load a verified checkpoint; of optional optimizer state only what this run `keeps`, by name. Collective if a
    process group exists."""
    shapes, progress = tensor_shapes(path), read_progress(path)
    # Weights come first, since an optimizer may derive its initial state from them.
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
    """Load a checkpoint's optimizer state, whose keys have a `prefix`; collective."""
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


MAX_LISTED = 12


def load_initial_weights(
    path: Path, parts: Sequence[nn.Module], exclude: Sequence[str], group: dist.ProcessGroup | None = None
) -> None:
    """Load a checkpoint's weights into the model (or its parts on this rank); collective over the group.

    Weights whose full names match a pattern of `exclude` (`head.*`), and the state of the load balance, keep their
    values. A `group` of None is all ranks. Raises UserError with every missing, unexpected or reshaped weight, and
    every pattern that matches no weight.
    """
    state = {
        name.removeprefix(MODEL_PREFIX): value
        for name, value in model_state_dict(parts).items()
        if not is_training_state(name)
    }
    shapes = {
        key.removeprefix(MODEL_PREFIX): shape
        for key, shape in tensor_shapes(path).items()
        if key.startswith(MODEL_PREFIX) and not is_training_state(key)
    }

    def excluded(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in exclude)

    wanted = {name: value for name, value in state.items() if not excluded(name)}
    missing = [name for name in wanted if name not in shapes]
    reshaped = [
        f"{name} (saved {_shape_text(shapes[name])}, here {_shape_text(value.shape)})"
        for name, value in wanted.items()
        if name in shapes and shapes[name] != value.shape
    ]
    # Ranks hold different parts: names of the whole model and mismatches are reduced over the ranks.
    names = sorted(shapes)
    present = [name in state for name in names]
    matched = [any(fnmatchcase(name, pattern) for name in (*state, *names)) for pattern in exclude]
    reduced = torch.tensor([*present, *matched, bool(missing or reshaped)], dtype=torch.uint8)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    *flags, mismatch = reduced.bool().tolist()
    unexpected = [name for name, found in zip(names, flags, strict=False) if not found and not excluded(name)]
    unused = [pattern for pattern, found in zip(exclude, flags[len(names) :], strict=True) if not found]
    if mismatch or unexpected or unused:
        missing, reshaped = _gather_names(missing, group), _gather_names(reshaped, group)
        raise UserError(_explain_mismatch(path, missing, unexpected, reshaped, unused))
    load_into(path, {f"{MODEL_PREFIX}{name}": value for name, value in wanted.items()})
    sync_tied_weights(parts)
    kept = len(state) - len(wanted)
    get_logger().info(
        "%d weights and buffers from %s%s", len(wanted), path, f", and {kept} keep their initial values" if kept else ""
    )


def _explain_mismatch(
    path: Path, missing: list[str], unexpected: list[str], reshaped: list[str], unused: list[str]
) -> str:
    lines = [f"checkpoint.initial: the weights in {path} do not fit the model."]
    if missing:
        lines.append(f"  the checkpoint lacks: {_list(missing)}")
    if unexpected:
        lines.append(f"  the model lacks: {_list(unexpected)}")
    if reshaped:
        lines.append(f"  these have another shape: {_list(reshaped)}")
    if unused:
        lines.append(f"  these patterns of checkpoint.initial_exclude match nothing: {_list(unused)}")
    names = [name.partition(" ")[0] for name in (*missing, *unexpected, *reshaped)]
    if names:
        groups = sorted({weight_pattern(name) for name in names})
        lines.append(
            f"  Use the model of these weights, or initialize them anew: checkpoint.initial_exclude='{shown(groups)}'"
        )
    return "\n".join(lines)


def _list(names: list[str]) -> str:
    shown_names = ", ".join(names[:MAX_LISTED])
    return f"{shown_names} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown_names


def _shape_text(size: Sequence[int]) -> str:
    return "×".join(map(str, size)) or "scalar"


def _gather_names(names: list[str], group: dist.ProcessGroup | None) -> list[str]:
    if not dist.is_initialized():
        return names
    found: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, names, group=group)
    return list(dict.fromkeys(name for part in found for name in part))
