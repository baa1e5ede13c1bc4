"""The training state as one flat dictionary of tensors, keyed by full names, so that any layout can read it.

Everything that is not a tensor travels as JSON in a byte tensor: a checkpoint is read without executing code.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MODEL_PREFIX, OPTIMIZER_PREFIX, DATA_PREFIX, PROGRESS_KEY = "model.", "optimizer.", "data.", "progress"
WEIGHTS_ONLY_KEY = "weights_only"
"""Key of the progress of a checkpoint that no run can be continued from."""


def training_state_dict(
    parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, data: Mapping[str, Any], progress: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Collect what a checkpoint holds.

    Args:
        parts: the model, or its parts on this rank; parameters and persistent buffers are keyed `model.<full name>`.
        optimizer: its tensors are keyed `optimizer.<full parameter name>.<state name>`.
        data: JSON-able state of each virtual shard that this rank reads, keyed `data.<shard>`.
        progress: JSON-able counters of the whole run.
    """
    return {
        **model_state_dict(parts),
        **optimizer_state_dict(parts, optimizer),
        **{f"{DATA_PREFIX}{shard}": encode_json(state) for shard, state in data.items()},
        PROGRESS_KEY: encode_json(progress),
    }


def model_state_dict(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and persistent buffers by full name; the tensors themselves, not copies.

    Of a tensor that two parts have copies of, the first part's.
    """
    return _first_of_each(_model_tensors(parts))


def optimizer_state_dict(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by full parameter name; the tensors themselves, not copies."""
    return _first_of_each(_optimizer_tensors(parts, optimizer))


@torch.no_grad()
def sync_tied_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Give what two parts have copies of the state of the first part's, which is the one that was loaded."""
    _copy_to_copies((*_model_tensors(parts), *_optimizer_tensors(parts, optimizer)))


@torch.no_grad()
def sync_tied_weights(parts: Sequence[nn.Module]) -> None:
    """The same for the model alone."""
    _copy_to_copies(_model_tensors(parts))


def init_optimizer_state(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state, so that there is something to load into; parameters keep their values."""
    parameters = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)


def encode_json(value: object) -> Tensor:
    """A JSON-able value as a byte tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def decode_json(tensor: Tensor) -> Any:
    """The value that `encode_json` took."""
    return json.loads(bytes(tensor.cpu().tolist()))


def _copy_to_copies(named: Iterable[tuple[str, Tensor]]) -> None:
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


def _optimizer_tensors(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        for name, parameter in part.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{OPTIMIZER_PREFIX}{name}.{key}", value


def _first_of_each(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in named:
        found.setdefault(name, tensor)
    return found
