"""Training state dict: flat, keyed by full names, readable in any layout.

Non-tensor state is stored as JSON in byte tensors, so that loading a checkpoint executes no code.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_exp.checkpoint.optimizer_state import (
    VALUES_PREFIX,
    equals_weights,
    is_average,
    optimizer_state_dict,
    optimizer_tensors,
    optimizer_values,
)
from titan_exp.config.foreign_file import parse_value
from titan_exp.models.spec.moe import TRAINING_BUFFERS

MODEL_PREFIX, DATA_PREFIX, PROGRESS_KEY = "model.", "data.", "progress"
WEIGHTS_ONLY_KEY = "weights_only"
"""Progress key that marks a checkpoint as weights-only."""


def training_state_dict(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, data: Mapping[str, Any], progress: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Build the state dict of a full checkpoint.

    Keys are `model.<full name>` for parameters and persistent buffers, the keys of `optimizer_state`, `data.<shard>`
    for the JSON state of each virtual shard that this rank reads, and `progress` for JSON counters. Raises
    UnsavedStateError about optimizer state that cannot be saved.
    """
    return {
        **model_state_dict(parts),
        **{key: value for key, value in optimizer_state_dict(parts, optimizer).items() if not equals_weights(key)},
        **{f"{VALUES_PREFIX}{key}": encode_json(value) for key, value in optimizer_values(parts, optimizer).items()},
        **{f"{DATA_PREFIX}{shard}": encode_json(state) for shard, state in data.items()},
        PROGRESS_KEY: encode_json(progress),
    }


def model_state_dict(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by full name, not copied.

    For a tied tensor with copies in two parts, the first part's is used.
    """
    return _first_by_name(_model_tensors(parts))


def persistent_buffers(parts: Sequence[nn.Module]) -> list[Tensor]:
    """Persistent buffers of a checkpoint, such as router biases, not copied."""
    named = [(name, buffer, part.state_dict().keys()) for part in parts for name, buffer in part.named_buffers()]
    return [buffer for name, buffer, kept in named if name in kept]


def average_state_dict(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Averaged weights from the optimizer's state, under the same keys, not copied."""
    return {key: value for key, value in optimizer_state_dict(parts, optimizer).items() if is_average(key)}


@torch.no_grad()
def sync_tied_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Copy tied weights and their optimizer state from the first (loaded) part to the others."""
    _copy_first_to_others((*_model_tensors(parts), *optimizer_tensors(parts, optimizer)))


@torch.no_grad()
def sync_tied_weights(parts: Sequence[nn.Module]) -> None:
    """Copy tied weights from the first part to the others."""
    _copy_first_to_others(_model_tensors(parts))


def is_training_state(name: str) -> bool:
    """True for a buffer, by full name, that only training reads; other tools and new runs need none."""
    return name.rpartition(".")[2] in TRAINING_BUFFERS


def encode_json(value: object) -> Tensor:
    """Encode a JSON value as a byte tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode_json(tensor: Tensor) -> Any:
    """Decode a byte tensor of `encode_json`. Raises UserError if it is damaged."""
    return parse_value(bytes(tensor.cpu().tolist()), "an entry of the checkpoint")


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


def _first_by_name(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        tensors.setdefault(name, tensor)
    return tensors
