"""Initialization of meta models: each rank draws its own shards of the initial weights."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_exp.models.blocks.linear import InitSpec, ShardSpec, init_shard_
from titan_exp.ops.autograd import local_tensor

BufferPlace = tuple[nn.Module, str]
"""Module and name of a buffer in it."""


def buffer_places(model: nn.Module) -> dict[str, BufferPlace]:
    """Places of a model's buffers by buffer name, since wrappers would change the names."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
    }


def materialize_parameters(
    model: nn.Module, device: torch.device, *, cpu_offload: bool = False
) -> Collection[BufferPlace]:
    """Allocate the parameters of a sharded meta model, unfilled, and compute its buffers.

    Offloaded parameters go to the CPU, everything else to `device`. Returns the buffers that no module's
    `reset_buffers` computed.
    """
    places = _places(model)
    model.to_empty(device="cpu" if cpu_offload else device)
    for (owner, attribute), *others in places:
        for module, name in others:  # `to_empty` unties weights that leave the meta device
            setattr(module, name, getattr(owner, attribute))
    if cpu_offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set
                )
    unfilled = {place: _buffer(place) for place in buffer_places(model).values()}
    versions = {place: buffer._version for place, buffer in unfilled.items()}
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()  # type: ignore[operator]  # a method, not a submodule
    return [
        place for place, buffer in unfilled.items() if _buffer(place) is buffer and buffer._version == versions[place]
    ]


def _buffer(place: BufferPlace) -> Tensor:
    module, name = place
    return module.get_buffer(name)


def _places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Modules and names of each parameter; a tied weight has several."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[parameter].append((module, name))
    return list(places.values())


def every_weight(name: str) -> bool:
    """True for any weight: the default selection of weights by full name."""
    return True


@torch.no_grad()
def init_weights(
    model: nn.Module, table: Mapping[str, InitSpec], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from their initial distributions, identically in every layout and on every device,
    without communication."""
    for name, parameter in model.named_parameters():
        if selected(name):
            init_shard_(local_tensor(parameter), seed, name, table[name], local_shard(parameter))


@torch.no_grad()
def init_buffers(
    places: Mapping[str, BufferPlace], unfilled: Collection[BufferPlace], build: Callable[[], nn.Module], seed: int
) -> None:
    """Fill the `unfilled` ones of a model's own buffers from a whole model built on the CPU under the seed. `places`
    were taken before the model was sharded."""
    names = [name for name, place in places.items() if place in unfilled]
    if not names:
        return
    whole = _build_whole(build, seed)
    for name in names:
        _buffer(places[name]).copy_(whole.get_buffer(name))


@torch.no_grad()
def copy_initial_weights(
    model: nn.Module, build: Callable[[], nn.Module], seed: int, selected: Callable[[str], bool] = every_weight
) -> None:
    """Fill selected parameters from a whole model built on the CPU under the seed.

    Serves models that do not declare their initial weights; each rank temporarily holds the whole model in memory.
    """
    targets = {name: parameter for name, parameter in model.named_parameters() if selected(name)}
    if not targets:
        return
    whole = _build_whole(build, seed).state_dict()
    for name, target in targets.items():
        if name not in whole:
            continue
        part = local_shard(target)
        window = tuple(slice(first, first + size) for first, size in zip(part.start, part.size, strict=True))
        local_tensor(target).copy_(whole[name][window])


def _build_whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def local_shard(tensor: Tensor) -> ShardSpec:
    """Local shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return ShardSpec.whole(tuple(tensor.shape))
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardSpec(tuple(tensor.shape), tuple(start), tuple(size))
