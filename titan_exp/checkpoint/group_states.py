"""Inner optimizer states of all replica groups of semi-synchronous training, in the checkpoint that one of them writes.

Keys are `group.<number>.optimizer.<full parameter name>.<state name>`. The writer's own state is under `optimizer.`;
the progress names it as `WRITER`. Streaming DiLoCo also has the weights of every group, `group.<number>.model.<full
parameter name>`; those under `model.` are the outer optimizer's, about which all groups agree.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.checkpointer import read_progress
from titan_exp.checkpoint.dcp.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.state_dict import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    init_optimizer_state,
    is_outer,
    model_state_dict,
    optimizer_state_dict,
    sync_tied_state,
)
from titan_exp.optim.outer.outer_optimizer import KEPT

GROUP_PREFIX = "group."
WRITER = "writer"
"""Progress key: number of the group that wrote the checkpoint."""


def inner_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of the inner optimizer by key, not copied, in an order that is the same in all groups."""
    state = optimizer_state_dict(parts, optimizer)
    return {key: state[key] for key in sorted(state) if not is_outer(key)}


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


def own_weights(own: dict[str, Tensor], group: int) -> dict[str, Tensor]:
    """A group's own weights in its `own_state`, by their keys in a checkpoint."""
    return {f"{GROUP_PREFIX}{group}.{key}": value for key, value in own.items() if key.startswith(MODEL_PREFIX)}


def empty_states(own: dict[str, Tensor], groups: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Tensors for the states of other groups by number, placed like this group's."""
    return {
        group: {f"{GROUP_PREFIX}{group}.{key}": torch.empty_like(value) for key, value in own.items()}
        for group in groups
    }


def load_own_state(
    path: Path, group: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, *, weights: bool
) -> bool:
    """Load a group's state, saved in any layout, into its optimizer, and its own `weights` into the model; False if a
    checkpoint has none of its own."""
    prefix = "" if read_progress(path).get(WRITER) == group else f"{GROUP_PREFIX}{group}."
    shapes = tensor_shapes(path)
    if not optimizer.state:
        init_optimizer_state(parts, optimizer)
    own = {f"{prefix}{key}": value for key, value in inner_state(parts, optimizer).items()}
    if weights:
        trained = own_state(parts, optimizer, weights=True)
        model = model_state_dict(parts)
        own |= own_weights({key: model[key] for key in trained if key in model}, group)
    if not own.keys() <= shapes.keys():
        return False
    load_into(path, own)
    sync_tied_state(parts, optimizer)
    return True
