"""Inner optimizer states of all replica groups of semi-synchronous training, in the checkpoint that one of them writes.

Keys are `group.<number>.optimizer.<full parameter name>.<state name>`. The writer's own state is under `optimizer.`;
the progress names it as `WRITER`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.checkpointer import read_progress
from titan_exp.checkpoint.dcp.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.state_dict import init_optimizer_state, is_outer, optimizer_state_dict

GROUP_PREFIX = "group."
WRITER = "writer"
"""Progress key: number of the group that wrote the checkpoint."""


def inner_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """State of the inner optimizer by key, not copied, in an order that is the same in all groups."""
    state = optimizer_state_dict(parts, optimizer)
    return {key: state[key] for key in sorted(state) if not is_outer(key)}


def empty_states(own: dict[str, Tensor], groups: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Tensors for the states of other groups by number, placed like this group's."""
    return {
        group: {f"{GROUP_PREFIX}{group}.{key}": torch.empty_like(value) for key, value in own.items()}
        for group in groups
    }


def load_inner_state(path: Path, group: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> bool:
    """Load a group's state, saved in any layout, into its optimizer; False if a checkpoint has none of its own."""
    prefix = "" if read_progress(path).get(WRITER) == group else f"{GROUP_PREFIX}{group}."
    shapes = tensor_shapes(path)
    if not optimizer.state:
        init_optimizer_state(parts, optimizer)
    own = {f"{prefix}{key}": value for key, value in inner_state(parts, optimizer).items()}
    if not own.keys() <= shapes.keys():
        return False
    load_into(path, own)
    return True
