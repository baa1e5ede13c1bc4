"""The one global gradient norm, and clipping by it.

Squared sums are taken per mesh and placement and added over the axes that shard them, so parameters may live on any
mixture of meshes; a replicated tensor counts once.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """L2 norm of all gradients of the whole model, an fp32 scalar that is the same on every rank.

    Args:
        parameters: this rank's, each once: of a weight that two pipeline stages have copies of, one.
        stages: ranks that hold the other parts of the model; None where this one holds all.
    """
    groups: dict[object, list[Tensor]] = defaultdict(list)
    meshes = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        meshes[key] = gradient if isinstance(gradient, DTensor) else None
        groups[key].append(_local(gradient))
    squares = []
    for key, gradients in groups.items():
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        square = torch.stack(norms).square().sum()
        sample = meshes[key]
        if sample is not None:
            for axis, placement in enumerate(sample.placements):
                assert not placement.is_partial(), "a gradient must be reduced before it is measured"
                # Not only Shard: dim 0 sharded twice is a class of its own.
                if not placement.is_replicate():
                    dist.all_reduce(square, group=sample.device_mesh.get_group(axis))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), a scalar that stays on the device."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients by `clip_factor`, in place and without asking the device for the norm."""
    factor = clip_factor(norm, max_norm)
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
