"""Data parallelism: FSDP2, HSDP and DDP are one mechanism on different meshes.

Gradients are summed over data ranks, never averaged: the loss is already divided by the tokens of the whole global
batch. DDP is HSDP whose shards are whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_exp.config.errors.did_you_mean import did_you_mean
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.models.blocks.block_list import iter_blocks
from titan_exp.parallel.mesh import Mesh


@dataclass(frozen=True)
class FSDPOptions:
    """Options of FSDP."""

    bf16: bool
    """Compute in bf16: parameters stay fp32, are cast when gathered, and their gradients are reduced in fp32."""
    reshard_after_forward: Literal["always", "never", "all_but_last"] = "all_but_last"
    """When a block frees its gathered parameters."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state live in the CPU's memory."""
    prefetch_blocks: int = 1
    """Blocks gathered ahead of the one that computes."""
    fp32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in fp32 with bf16."""


def apply_fsdp(model: nn.Module, mesh: Mesh, sharding: FSDPOptions) -> None:
    """Shard the model in place, block by block, over the mesh's parameter axes.

    One fp32 rank alone needs none of it and is left as it is, unless its parameters are offloaded. Of `fp32_modules`,
    those count that are there: `require_modules` tells whether a whole model has them.
    """
    if mesh.fsdp_mesh.size() == 1 and not sharding.bf16 and not sharding.cpu_offload:
        return
    # Inputs are not cast: the residual stream has its type from the embedding, and rotary tables stay fp32.
    low = torch.bfloat16 if sharding.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    place = partial(_sharded_dim, degree=mesh.sharding["fsdp"].size())
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if sharding.cpu_offload else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh.fsdp_mesh, "offload_policy": offload, "shard_placement_fn": place}
    blocks = list(iter_blocks(model))
    for module in _matching(model, sharding.fp32_modules):
        full = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=low)
        fully_shard(module, mp_policy=full, reshard_after_forward=False, **how)
    for index, block in enumerate(blocks):
        if isinstance(block, FSDPModule):
            continue
        # Whole shards have nothing to free; the last block's parameters are what backward needs first.
        last = index == len(blocks) - 1
        free = {"always": True, "never": False, "all_but_last": not last}[sharding.reshard_after_forward]
        free = free and mesh.sharding["fsdp"].size() > 1
        fully_shard(block, mp_policy=policy, reshard_after_forward=free, **how)
    # Embedding, norm and head share the root's group: tied weights must not be split over two.
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **how)
    _prefetch(blocks, sharding.prefetch_blocks)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        # Without this a factor is still applied as part of the reduction, which gloo does not know.
        module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Say whether the coming backward pass is the last of its optimizer step: only that one reduces gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def require_modules(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Every pattern of `fp32_modules` names a module of the whole model, of which a stage may hold none.

    Raises:
        UserError: one does not.
    """
    named = _named(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            offer = did_you_mean(pattern, named) or "patterns look like blocks.*.attention_norm"
            violation = Violation("training.fp32_modules", pattern, "the model has no such module", offer)
            raise UserError("This run cannot be started.", [violation])


def _sharded_dim(parameter: nn.Parameter, degree: int) -> Shard | None:
    """Dim 0, unless tensor parallelism divides it too and it does not come out even.

    A dim that is divided twice must be so evenly, else torch takes a shard for other rows than it holds.
    """
    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    return None if parameter.shape[0] % (parameter.device_mesh.size() * degree) == 0 else Shard(1)


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Modules that any of the patterns names, each once, and none inside another of them."""
    named = _named(model)
    found = {name: module for pattern in patterns for name, module in named.items() if fnmatchcase(name, pattern)}
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _named(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Gather several blocks ahead; one is what FSDP2 does by itself."""
    if ahead == 1:
        return
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(sharded[max(0, index - ahead) : index][::-1])


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
