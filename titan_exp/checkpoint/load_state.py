"""Training state: a flat state dict keyed by full names, readable in any layout; loading it, and initial weights.

Non-tensor state is stored as JSON in byte tensors, so that loading a checkpoint executes no code.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.checkpoint.optimizer_state import (
    OPTIMIZER_PREFIX,
    VALUES_PREFIX,
    SavedTensor,
    equals_weights,
    first_by_name,
    is_average,
    is_optional,
    optimizer_state_dict,
    optimizer_tensors,
    optimizer_values,
    prepare_optimizer_state,
)
from titan_exp.checkpoint.storage_reader import load_into, require_stored, tensor_entries, tensor_shapes
from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.foreign_file import parse_value
from titan_exp.models.spec.moe import TRAINING_BUFFERS
from titan_exp.parallel.mesh import gather_objects
from titan_exp.rules.weights import weight_pattern
from titan_exp.tracking.logging import get_logger

MODEL_PREFIX, DATA_PREFIX, PROGRESS_KEY = "model.", "data.", "progress"
WEIGHTS_ONLY_KEY = "weights_only"  # progress key that marks a checkpoint as weights-only


def training_state_dict(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, data: Mapping[str, Any], progress: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Build the state dict of a full checkpoint. Keys are `model.<full name>` for parameters and persistent buffers,
    the keys of `optimizer_state`, `data.<shard>` for the JSON state of each virtual shard that this rank reads, and
    `progress` for JSON counters. Raises UnsavedStateError about optimizer state that cannot be saved."""
    return {
        **model_state_dict(parts),
        **{key: value for key, value in optimizer_state_dict(parts, optimizer).items() if not equals_weights(key)},
        **{f"{VALUES_PREFIX}{key}": encode_json(value) for key, value in optimizer_values(parts, optimizer).items()},
        **{f"{DATA_PREFIX}{shard}": encode_json(state) for shard, state in data.items()},
        PROGRESS_KEY: encode_json(progress),
    }


def model_state_dict(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by full name, not copied; of a tied tensor in two parts, the first's."""
    return first_by_name(_model_tensors(parts))


def persistent_buffers(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Persistent buffers of a checkpoint, such as router biases, not copied."""
    named = [(name, buffer, part.state_dict().keys()) for part in parts for name, buffer in part.named_buffers()]
    return [buffer for name, buffer, kept in named if name in kept]


def average_state_dict(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Averaged weights from the optimizer's state, under the same keys, not copied."""
    return {key: value for key, value in optimizer_state_dict(parts, optimizer).items() if is_average(key)}


def sync_tied_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Copy tied weights and their optimizer state from the first (loaded) part to the others."""
    _copy_first_to_others((*_model_tensors(parts), *optimizer_tensors(parts, optimizer)))


def is_training_state(name: str) -> bool:
    """True for a buffer, by full name, that only training reads; other tools and new runs need none."""
    return name.rpartition(".")[2] in TRAINING_BUFFERS


def encode_json(value: object) -> Tensor:
    """Encode a JSON value as a byte tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode_json(tensor: Tensor) -> Any:
    """Decode a byte tensor of `encode_json`. Raises UserError if it is damaged."""
    return parse_value(bytes(tensor.cpu().tolist()), "an entry of the checkpoint")


@torch.no_grad()
def _copy_first_to_others(named: Iterable[tuple[str, Tensor]]) -> None:
    originals: dict[str, Tensor] = {}
    for name, tensor in named:
        if name in originals:
            tensor.copy_(originals[name])
        else:
            originals[name] = tensor


def _model_tensors(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        for name, value in part.state_dict().items():
            yield f"{MODEL_PREFIX}{name}", value.detach()


@dataclass(frozen=True)
class RestoredState:
    """Non-tensor state of a checkpoint."""

    progress: dict[str, Any]
    data: dict[str, Any]  # data-loader state of every virtual shard


def read_progress(path: Path) -> dict[str, Any]:
    """Progress of a checkpoint: step, tokens, configuration."""
    return read_json_entries(path, tensor_shapes(path), PROGRESS_KEY)[PROGRESS_KEY]


def load_state(
    path: Path, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, keeps: Collection[str] = ()
) -> RestoredState:
    """Load a verified checkpoint; of optional optimizer state what this run `keeps`, by name. Collective."""
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
    """Load a checkpoint's weights into the model (or its parts on this rank); collective over the group. Weights whose
    full names match a pattern of `exclude` (`head.*`), and the state of the load balance, keep their values. A `group`
    of None is all ranks. Raises UserError with every missing, unexpected or reshaped weight, and every pattern that
    matches no weight."""
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
    _copy_first_to_others(_model_tensors(parts))
    kept = len(state) - len(wanted)
    others = f", and {kept} keep their initial values" if kept else ""
    get_logger().info("%d weights and buffers from %s%s", len(wanted), path, others)


def _explain_mismatch(
    path: Path, missing: list[str], unexpected: list[str], reshaped: list[str], unused: list[str]
) -> str:
    differences = {
        "the checkpoint lacks": missing,
        "the model lacks": unexpected,
        "these have another shape": reshaped,
        "these patterns of checkpoint.initial_exclude match nothing": unused,
    }
    lines = [f"checkpoint.initial: the weights in {path} do not fit the model."]
    for what, found in differences.items():
        if found:
            more = f" and {len(found) - MAX_LISTED} more" if len(found) > MAX_LISTED else ""
            lines.append(f"  {what}: {', '.join(found[:MAX_LISTED])}{more}")
    names = [name.partition(" ")[0] for name in (*missing, *unexpected, *reshaped)]
    if names:
        groups = sorted({weight_pattern(name) for name in names})
        anew = f"initialize them anew: checkpoint.initial_exclude='{shown(groups)}'"
        lines.append(f"  Use the model of these weights, or {anew}")
    return "\n".join(lines)


def _shape_text(size: Sequence[int]) -> str:
    return "×".join(map(str, size)) or "scalar"


def _gather_names(names: list[str], group: dist.ProcessGroup | None) -> list[str]:
    if not dist.is_initialized():
        return names
    return list(dict.fromkeys(name for part in gather_objects(names, group) for name in part))
