"""Global gradient norm and gradient clipping.

Squared norms are summed per mesh and placement and reduced over the axes that shard them, so parameters may live on any
mixture of meshes; a replicated tensor counts once.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.optimizer import ScalesGradients


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor], pp_group: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm of all gradients of the model, an fp32 scalar equal on every rank.

    `parameters` are this rank's, without copies of tied weights that another pipeline stage counts.
    """
    groups: dict[object, list[Tensor]] = defaultdict(list)
    meshes, device = {}, torch.device("cpu")
    for parameter in parameters:
        gradient, device = parameter.grad, parameter.device
        if gradient is None:
            continue
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        meshes[key] = gradient if isinstance(gradient, DTensor) else None
        groups[key].append(local_tensor(gradient))
    squares = []
    for key, gradients in groups.items():
        square = torch.stack(_norms(gradients)).square().sum()
        sample = meshes[key]
        if sample is not None:
            for axis, placement in enumerate(sample.placements):
                assert not placement.is_partial(), "gradients are reduced before their norm"
                # Not only Shard: a dim sharded twice has its own placement class.
                if not placement.is_replicate():
                    dist.all_reduce(square, group=sample.device_mesh.get_group(axis))
        squares.append(square)
    # Also without gradients it is where other stages have theirs, for one message.
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.sqrt()


@torch.no_grad()
def parameter_norms(parameters: Sequence[Tensor]) -> Tensor:
    """L2 norm of each parameter's whole gradient, fp32 [parameters], equal on its ranks; 0 without a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    norms = iter(_norms([local_tensor(gradient) for gradient in gradients if gradient is not None]))
    squares = [
        local_tensor(parameter.detach()).new_zeros((), dtype=torch.float32)
        if parameter.grad is None
        else next(norms).square()
        for parameter in parameters
    ]
    return sum_over_shards(squares, parameters).sqrt()


def sum_over_shards(numbers: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Sum of a number per shard over each parameter's shards, [parameters]; a message per mesh and placement."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        is_sharded = isinstance(parameter, DTensor)
        groups[(parameter.device_mesh, parameter.placements) if is_sharded else None].append(index)
    sums = list(numbers)
    for indices in groups.values():
        sample, found = parameters[indices[0]], torch.stack([numbers[index] for index in indices])
        if isinstance(sample, DTensor):
            for axis, placement in enumerate(sample.placements):
                if not placement.is_replicate():
                    dist.all_reduce(found, group=sample.device_mesh.get_group(axis))
        for index, total in zip(indices, found.unbind(), strict=True):
            sums[index] = total
    return torch.stack(sums)


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """fp32 norms of tensors, in their order: multi-tensor kernels take one dtype at a time."""
    norms: dict[int, Tensor] = {}
    for dtype in {gradient.dtype for gradient in gradients}:
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        found = torch._foreach_norm([gradients[place] for place in places], 2, dtype=torch.float32)
        norms |= zip(places, found, strict=True)
    return [norms[place] for place in range(len(gradients))]


def clip_gradients(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], norm: Tensor, max_norm: float
) -> None:
    """Clip gradients of the global norm `norm` to `max_norm`: by the optimizer if it can, else in place."""
    if isinstance(optimizer, ScalesGradients):
        optimizer.set_grad_scale(clip_factor(norm, max_norm))
    else:
        scale_gradients(parameters, norm, max_norm)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), a scalar on the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by `clip_factor` in place, without a device sync."""
    factor = clip_factor(norm, max_norm)
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
