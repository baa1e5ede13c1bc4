"""Inner optimizer states of all replica groups of semi-synchronous training, in the checkpoint that one of them writes.

Keys are those of `optimizer_state` behind `group.<number>.`. The writer's own state has plain keys;
the progress names it as `WRITER`. Streaming DiLoCo also has the weights of every group, `group.<number>.model.<full
parameter name>`; those under `model.` are the outer optimizer's, about which all groups agree.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.dcp.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.load_state import load_optimizer_state, read_progress
from titan_exp.checkpoint.optimizer_state import (
    OPTIMIZER_PREFIX,
    VALUES_PREFIX,
    SavedTensor,
    empty_tensors,
    init_optimizer_state,
    optimizer_state_dict,
    optimizer_values,
    prepare_optimizer_state,
)
from titan_exp.checkpoint.state_dict import MODEL_PREFIX, encode_json, model_state_dict, sync_tied_state
from titan_exp.extensions.replica_groups.outer_optimizer import KEPT, MOMENTUM

GROUP_PREFIX = "group."
WRITER = "writer"
"""Progress key: number of the group that wrote the checkpoint."""
Description = dict[str, Any]
"""JSON: shapes and dtypes of a rank's tensors by key, and its optimizer's values."""


def inner_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of the inner optimizer by key, not copied, in an order that is the same in all groups."""
    state = optimizer_state_dict(parts, optimizer)
    return {key: state[key] for key in sorted(state) if not key.endswith((f".{KEPT}", f".{MOMENTUM}"))}


def own_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, weights: bool) -> dict[str, Tensor]:
    """State that other groups have otherwise, not copied: of the inner optimizer, and this group's `weights`, which the
    outer optimizer has swapped."""
    own = inner_state(parts, optimizer)
    if weights:
        state = optimizer_state_dict(parts, optimizer)
        for key in sorted(state):
            if key.endswith(f".{KEPT}"):
                name = key.removeprefix(OPTIMIZER_PREFIX).removesuffix(f".{KEPT}")
                own[f"{MODEL_PREFIX}{name}"] = state[key]
    return own


def own_weights(own: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    """A group's own weights in its `own_state`, by their keys in a checkpoint."""
    return {f"{GROUP_PREFIX}{group}.{key}": value for key, value in own.items() if key.startswith(MODEL_PREFIX)}


def described(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> Description:
    """Description of a rank's `tensors`, in their order, and of its optimizer's values."""
    kinds = {key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in tensors.items()}
    return {"tensors": kinds, "values": optimizer_values(parts, optimizer)}


def empty_state(
    parts: Sequence[nn.Module], own: Mapping[str, Tensor], group: int, description: Description
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors for the described state of another group, placed like this group's `own`, and its values, both by their
    keys in a checkpoint."""
    tensors, prefix = empty_tensors(parts, own, _described_tensors(description)), f"{GROUP_PREFIX}{group}."
    values = {f"{prefix}{VALUES_PREFIX}{key}": encode_json(value) for key, value in description["values"].items()}
    return {f"{prefix}{key}": value for key, value in tensors.items()}, values


def healing_state(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, description: Description | None = None
) -> dict[str, Tensor]:
    """A rank's whole state by key, not copied, in an order that is the same in all groups. A group that heals gives
    the optimizer's state the form of the sender's `description` first."""
    if description is not None:
        tensors = _described_tensors(description)
        saved = {key: tensor for key, tensor in tensors.items() if key.startswith(OPTIMIZER_PREFIX)}
        prepare_optimizer_state(parts, optimizer, saved, description["values"], whole=True)
    state = {**model_state_dict(parts), **optimizer_state_dict(parts, optimizer)}
    return {key: state[key] for key in (sorted(state) if description is None else description["tensors"])}


def load_own_state(
    path: Path, group: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, weights: bool
) -> bool:
    """Load a group's state, saved in any layout, into its optimizer, and its own `weights` into the model; False if a
    checkpoint has none of its own."""
    prefix = "" if read_progress(path).get(WRITER) == group else f"{GROUP_PREFIX}{group}."
    shapes = tensor_shapes(path)
    if not any(key.startswith(f"{prefix}{OPTIMIZER_PREFIX}") for key in shapes):
        return False
    trained = dict[str, Tensor]()
    if weights:
        if not optimizer.state:
            init_optimizer_state(parts, optimizer)
        kept, model = own_state(parts, optimizer, weights=True), model_state_dict(parts)
        trained = own_weights({key: model[key] for key in kept if key in model}, group)
    if not trained.keys() <= shapes.keys():
        return False
    load_optimizer_state(path, parts, optimizer, prefix)
    load_into(path, trained)
    sync_tied_state(parts, optimizer)
    return True


def _described_tensors(description: Description) -> dict[str, SavedTensor]:
    kinds = description["tensors"]
    return {key: SavedTensor(torch.Size(shape), getattr(torch, dtype)) for key, (shape, dtype) in kinds.items()}
