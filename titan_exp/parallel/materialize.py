"""From meta tensors to real ones: every rank draws just its own shards of the initial weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_exp.models.initialization import Init, Part, initial_slice


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a sharded meta model memory on `device`, parameters unfilled, and compute its buffers."""
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # type: ignore[operator]  # a method, not a submodule


@torch.no_grad()
def draw_initial_weights(model: nn.Module, table: Mapping[str, Init], seed: int) -> None:
    """Fill parameters from their declared distributions; the same values in every layout, without communication."""
    for name, parameter in model.named_parameters():
        _local(parameter).copy_(initial_slice(seed, name, table[name], _part(parameter)))


@torch.no_grad()
def copy_initial_weights(model: nn.Module, build: Callable[[], nn.Module], seed: int) -> None:
    """Fill parameters from a whole model built on the CPU under the seed.

    For models that do not declare their initial weights; costs each rank the memory of the whole model for a moment.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = build()
        whole = {**reference.state_dict(), **dict(reference.named_buffers())}
    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        if name not in whole:
            continue
        part = _part(target)
        window = tuple(slice(first, first + size) for first, size in zip(part.start, part.size, strict=True))
        _local(target).copy_(whole[name][window])


def _part(tensor: Tensor) -> Part:
    """What this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return Part.whole(tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(tuple(tensor.shape), tuple(start), tuple(size))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
