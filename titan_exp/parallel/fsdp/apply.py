"""Fully sharded data parallelism: FSDP2, HSDP and DDP are one mechanism on different meshes.

Gradients are summed over data ranks, never averaged: the loss is already divided by the tokens of the global batch. DDP
is HSDP with unsharded parameters.
"""

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
    """Compute in bf16 with fp32 parameters and fp32 gradient reduction."""
    reshard_after_forward: Literal["always", "never", "all_but_last"] = "all_but_last"
    """When blocks free their gathered parameters after forward."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory."""
    prefetch_blocks: int = 1
    """Number of blocks gathered ahead of the computing one."""
    fp32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in fp32 under `bf16`; those without a match are ignored here,
    because a pipeline stage may not hold the module (`require_modules` checks the whole model)."""


def apply_fsdp(model: nn.Module, mesh: Mesh, sharding: FSDPOptions) -> None:
    """Shard the model block by block, in place; a single fp32 rank without offloading stays as it is."""
    if mesh.fsdp_mesh.size() == 1 and not sharding.bf16 and not sharding.cpu_offload:
        return
    # Inputs are not cast: the embedding sets the dtype of the residual stream, and the RoPE cache stays fp32.
    low = torch.bfloat16 if sharding.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
    placement = partial(_sharded_dim, degree=mesh.sharding["fsdp"].size())
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if sharding.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh.fsdp_mesh, "offload_policy": offload, "shard_placement_fn": placement}
    blocks = list(iter_blocks(model))
    for module in _matching(model, sharding.fp32_modules):
        full = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=low)
        fully_shard(module, mp_policy=full, reshard_after_forward=False, **options)
    for index, block in enumerate(blocks):
        if isinstance(block, FSDPModule):
            continue
        # Unsharded parameters cannot be freed; the last block's parameters are needed first in backward.
        last = index == len(blocks) - 1
        free = {"always": True, "never": False, "all_but_last": not last}[sharding.reshard_after_forward]
        free = free and mesh.sharding["fsdp"].size() > 1
        fully_shard(block, mp_policy=policy, reshard_after_forward=free, **options)
    # Embedding, norm and head share the root's group: tied weights must not be split over two groups.
    fully_shard(model, mp_policy=policy, reshard_after_forward=False, **options)
    _prefetch(blocks, sharding.prefetch_blocks)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Else the factor becomes part of the reduction op, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Reduce gradients in the coming backward pass only if it is the last of the optimizer step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def require_modules(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Check that every pattern of `fp32_modules` matches a module of the whole model.

    Raises:
        UserError: a pattern matches no module.
    """
    named = _named(model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            offer = did_you_mean(pattern, named) or "patterns look like blocks.*.attention_norm"
            violation = Violation("training.fp32_modules", pattern, "the model has no such module", offer)
            raise UserError("This run cannot be started.", [violation])


def _sharded_dim(parameter: nn.Parameter, degree: int) -> Shard | None:
    """Dim 0, or dim 1 if tensor parallelism shards dim 0 too and does not divide evenly.

    torch assigns wrong rows to shards of a dim that is sharded twice unevenly.
    """
    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    return None if parameter.shape[0] % (parameter.device_mesh.size() * degree) == 0 else Shard(1)


def _matching(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """Outermost modules that match any of the patterns."""
    named = _named(model)
    found = {name: module for pattern in patterns for name, module in named.items() if fnmatchcase(name, pattern)}
    return [module for name, module in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def _named(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name and any(True for _ in module.parameters())}


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Gather several blocks ahead; one is FSDP2's default."""
    if ahead == 1:
        return
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
        block.set_modules_to_backward_prefetch(sharded[max(0, index - ahead) : index][::-1])
