"""Weights of another run as the beginning of a new one: all of them, but for what is left out by name."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.checkpoint.dcp.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.state_dict import MODEL_PREFIX, model_state_dict, sync_tied_weights
from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.tracking.logging import get_logger

MAX_LISTED = 12
"""So many weights of a kind are named in an error, of hundreds the first."""


def load_initial_weights(
    path: Path, parts: Sequence[nn.Module], exclude: Sequence[str], group: dist.ProcessGroup | None = None
) -> None:
    """Load a checkpoint's weights into the model (or its parts on this rank); all ranks of the group together.

    Args:
        path: folder of the checkpoint, made in any layout.
        parts: the model's parts.
        exclude: patterns of full names (`head.*`) of what keeps its value.
        group: the ranks that hold the model's parts; None is all of them.

    Raises:
        UserError: naming every weight that is missing in the checkpoint, that the model does not have, or that has
            another shape, and every pattern that fits no weight of either.
    """
    state = {name.removeprefix(MODEL_PREFIX): value for name, value in model_state_dict(parts).items()}
    shapes = {
        key.removeprefix(MODEL_PREFIX): shape
        for key, shape in tensor_shapes(path).items()
        if key.startswith(MODEL_PREFIX)
    }

    def excluded(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in exclude)

    wanted = {name: value for name, value in state.items() if not excluded(name)}
    missing = [name for name in wanted if name not in shapes]
    reshaped = [
        f"{name} (saved {_shape(shapes[name])}, here {_shape(value.shape)})"
        for name, value in wanted.items()
        if name in shapes and shapes[name] != value.shape
    ]
    # Ranks hold different parts: what the whole model has, and whether any rank has found a fault, is agreed on.
    names = sorted(shapes)
    has = [name in state for name in names]
    matched = [any(fnmatchcase(name, pattern) for name in (*state, *names)) for pattern in exclude]
    agreed = torch.tensor([*has, *matched, bool(missing or reshaped)], dtype=torch.uint8)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    *flags, faulty = agreed.bool().tolist()
    unexpected = [name for name, had in zip(names, flags, strict=False) if not had and not excluded(name)]
    idle = [pattern for pattern, met in zip(exclude, flags[len(names) :], strict=True) if not met]
    if faulty or unexpected or idle:
        missing, reshaped = _of_all_ranks(missing, group), _of_all_ranks(reshaped, group)
        raise UserError(_faults(path, missing, unexpected, reshaped, idle))
    load_into(path, {f"{MODEL_PREFIX}{name}": value for name, value in wanted.items()})
    sync_tied_weights(parts)
    kept = len(state) - len(wanted)
    get_logger().info(
        "%d weights and buffers from %s%s", len(wanted), path, f"; {kept} keep their initial values" if kept else ""
    )


def _faults(path: Path, missing: list[str], unexpected: list[str], reshaped: list[str], idle: list[str]) -> str:
    lines = [f"checkpoint.initial: the weights in {path} do not fit the model."]
    if missing:
        lines.append(f"  missing in the checkpoint: {_some(missing)}")
    if unexpected:
        lines.append(f"  not in the model: {_some(unexpected)}")
    if reshaped:
        lines.append(f"  of another shape: {_some(reshaped)}")
    if idle:
        lines.append(f"  patterns of checkpoint.initial_exclude that fit nothing: {_some(idle)}")
    faulty = [name.partition(" ")[0] for name in (*missing, *unexpected, *reshaped)]
    if faulty:
        groups = sorted({_group(name) for name in faulty})
        lines.append(
            f"  Choose the model that was trained, or leave these out: checkpoint.initial_exclude='{shown(groups)}'"
        )
    return "\n".join(lines)


def _group(name: str) -> str:
    return f"{name.partition('.')[0]}.*" if "." in name else name


def _some(names: list[str]) -> str:
    named = ", ".join(names[:MAX_LISTED])
    return f"{named} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else named


def _shape(size: Sequence[int]) -> str:
    return "×".join(map(str, size)) or "a single number"


def _of_all_ranks(names: list[str], group: dist.ProcessGroup | None) -> list[str]:
    if not dist.is_initialized():
        return names
    found: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(found, names, group=group)
    return list(dict.fromkeys(name for part in found for name in part))
