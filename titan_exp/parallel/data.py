"""Data parallelism: FSDP2, HSDP and DDP are one mechanism on different meshes.

Gradients are summed over data ranks, never averaged: the loss is already divided by the tokens of the whole global
batch. DDP is HSDP whose shards are whole.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_exp.parallel.mesh import Mesh


def shard_parameters(
    model: nn.Module, mesh: Mesh, *, bf16: bool, reshard_after_forward: Literal["always", "never", "all_but_last"]
) -> None:
    """Shard the model in place, block by block, over the mesh's parameter axes.

    With bf16, parameters stay fp32, are cast when gathered, and their gradients are reduced in fp32. One fp32 rank
    alone needs none of it and is left as it is.
    """
    if mesh.parameters.size() == 1 and not bf16:
        return
    # Inputs are not cast: the residual stream has its type from the embedding, and rotary tables stay fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    shards = mesh.sharding["fsdp"].size()
    blocks = list(blocks_of(model))
    for index, block in enumerate(blocks):
        last = index == len(blocks) - 1
        # Whole shards have nothing to free; the last block's parameters are what backward needs first.
        free = shards > 1 and {"always": True, "never": False, "all_but_last": not last}[reshard_after_forward]
        fully_shard(block, mesh=mesh.parameters, mp_policy=policy, reshard_after_forward=free)
    # Embedding, norm and head share the root's group: tied weights must not be split over two.
    fully_shard(model, mesh=mesh.parameters, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        # Without this a factor is still applied as part of the reduction, which gloo does not know.
        module.set_force_sum_reduction_for_comms(True)


def synchronize_gradients(model: nn.Module, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of its optimizer step: only that one reduces gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The model's transformer blocks, in order; none for a model that does not show them."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleDict):
        yield from blocks.values()


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
