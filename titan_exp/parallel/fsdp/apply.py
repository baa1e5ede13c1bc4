"""Data parallelism by FSDP2's `fully_shard`; HSDP and DDP are the same call on other meshes.

Gradients are summed over data ranks, never averaged: the loss is already divided by the tokens of the global batch. DDP
is HSDP with unsharded parameters.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from titan_exp.models.blocks.transformer import MTPModule, iter_blocks
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.expert_parallel.apply import mixtures
from titan_exp.parallel.fp32_modules import matching_modules
from titan_exp.parallel.fsdp.gradient_sync import accumulate_in_compute_dtype, move_forward_hooks, sum_gradients
from titan_exp.parallel.fsdp.model_ends import shard_ends
from titan_exp.parallel.mesh import Mesh


@dataclass(frozen=True)
class FSDPOptions:
    """Options of FSDP."""

    bf16: bool
    """Compute in bf16 with fp32 parameters and fp32 gradient reduction."""
    reshard_after_forward: Literal["always", "never", "all_but_last"] = "all_but_last"
    """Blocks that free their all-gathered parameters after forward."""
    bf16_sums: bool = False
    """Sum gradients of micro-batches in bf16 under `bf16`, and reduce the sum in fp32."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory."""
    prefetch_blocks: int = 1
    """Number of blocks all-gathered ahead of the one being computed."""
    fp32_modules: tuple[str, ...] = ()
    """Names or patterns of modules that compute in fp32 under `bf16`; those without a match are ignored here,
    because a pipeline stage may not hold the module (`require_modules` checks the whole model)."""


def apply_fsdp(model: nn.Module, mesh: Mesh, options: FSDPOptions) -> None:
    """Shard the model block by block, in place; no-op if `uses_fsdp` is false."""
    if not uses_fsdp(mesh, cpu_offload=options.cpu_offload):
        return
    units = _Units(model, mesh, options)
    shard, blocks = units.shard, list(iter_blocks(model))
    free = options.reshard_after_forward != "never"
    for index, block in enumerate(blocks):
        # The last block's parameters are needed first in backward. Freeing them would lower the bytes allocated at the
        # loss, but not those reserved, for a gather that nothing hides where the loss is computed in chunks.
        last = options.reshard_after_forward == "all_but_last" and index == len(blocks) - 1
        shard([block], reshard=free and not last)
        units.gather_with(block)
    kept = shard_ends(model, shard, free=free)
    shard([model], reshard=False)
    if free:
        _free_after_inference(model, [group for part in (*kept, *blocks[-1:]) for group in units.freed(part)])
    _prefetch(blocks, options.prefetch_blocks)
    sum_gradients(model)
    if options.bf16_sums:
        accumulate_in_compute_dtype(model)


def uses_fsdp(mesh: Mesh, *, cpu_offload: bool) -> bool:
    """True if there are several data ranks, or parameters lie in CPU memory; else `ComputeWeights` does the rest."""
    return max(mesh.fsdp_mesh.size(), mesh.expert_fsdp_mesh.size()) > 1 or cpu_offload


def free_gathered(parts: Iterable[nn.Module]) -> None:
    """Free gathered parameters of all units, so that the next pass gathers their current values."""
    for part in parts:
        for unit in _groups(part):
            unit.reshard()


class _Units:
    """FSDP units of a model: blocks and ends, and nested in them modules in fp32, and experts on a mesh of their own.

    Inputs are not cast: the embedding sets the dtype of the residual stream, and the RoPE cache stays fp32.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, options: FSDPOptions) -> None:
        dtype = torch.bfloat16 if options.bf16 else None
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
        self._mesh, self._offload = mesh, offload
        self._policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        self._to_fp32 = replace(self._fp32, output_dtype=dtype)
        outermost = matching_modules(model, options.fp32_modules)
        experts = [] if mesh.experts is None else [mixture.experts for mixture in mixtures(model)]
        self._in_fp32 = {part: part in outermost for module in outermost for part in module.modules()}
        """Modules in fp32; True for those that cast their inputs and outputs."""
        self._of_experts = {part for module in experts for part in module.modules()}
        self._nested = {*outermost, *experts}

    def shard(self, modules: Sequence[nn.Module], *, reshard: bool) -> None:
        """Make one unit of the modules, and units of the parts nested in them."""
        nested = [part for module in modules for part in module.modules() if part in self._nested]
        for part in reversed(nested):  # the inner ones first
            if not isinstance(part, FSDPModule):
                self._shard(part, part, reshard=reshard)
        if rest := [module for module in modules if module not in nested]:
            self._shard(rest, rest[0], reshard=reshard)

    def gather_with(self, block: nn.Module) -> None:
        """Gather the experts of a block when it is called, outside of what is compiled or recomputed."""
        for part in block.modules():
            if isinstance(part, FSDPModule) and part in self._of_experts and part not in self._in_fp32:
                move_forward_hooks(part, block)

    def freed(self, module: nn.Module) -> list[FSDPModule]:
        """Units of a module whose gathered parameters can be freed, since they are sharded."""
        return [part for part in _groups(module) if self._shards(part) > 1]

    def _shard(self, unit: Any, first: nn.Module, *, reshard: bool) -> None:
        policy = self._policy
        if first in self._in_fp32:
            policy = self._to_fp32 if self._in_fp32[first] else self._fp32
        choose = _sharded_dim_of_experts if first in self._of_experts else _sharded_dim
        fully_shard(
            unit,
            mesh=self._mesh_of(first),
            mp_policy=policy,
            shard_placement_fn=partial(choose, degree=self._shards(first)),
            reshard_after_forward=reshard and self._shards(first) > 1,
            offload_policy=self._offload,
        )

    def _mesh_of(self, module: object) -> DeviceMesh:
        return self._mesh.expert_fsdp_mesh if module in self._of_experts else self._mesh.fsdp_mesh

    def _shards(self, module: object) -> int:
        mesh = self._mesh_of(module)
        return mesh.size(mesh.ndim - 1)


def _sharded_dim_of_experts(parameter: nn.Parameter, degree: int) -> Shard | None:
    """First dim that the degree divides, experts before channels: torch takes an uneven dim 0 of plain tensors only."""
    sizes = local_tensor(parameter.detach()).shape
    dims = [dim for dim, size in enumerate(sizes) if size % degree == 0]
    assert dims or not isinstance(parameter, DTensor), "checked by the rules"
    return Shard(dims[0]) if dims else None


def _sharded_dim(parameter: nn.Parameter, degree: int) -> Shard | None:
    """Dim 0, or dim 1 if tensor parallelism shards dim 0 too and does not divide evenly.

    torch assigns wrong rows to shards of a dim that is sharded twice unevenly.
    """
    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    return None if parameter.shape[0] % (parameter.device_mesh.size() * degree) == 0 else Shard(1)


def _free_after_inference(model: nn.Module, kept: Sequence[FSDPModule]) -> None:
    """Free parameters that are kept for backward after a forward pass that has none."""

    def free(*_: Any) -> None:
        if not torch.is_grad_enabled():
            for group in kept:
                group.reshard()

    model.register_forward_hook(free)


def _prefetch(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Prefetch several blocks in forward and backward.

    FSDP2's default is the group before, which is a module of the same block where a block has `fp32_modules`.
    """
    groups = [_groups(block) for block in blocks]
    if ahead == 1 and all(len(of_block) == 1 for of_block in groups):
        return
    # An evaluation would gather modules of multi-token prediction and not run them.
    layers = sum(not isinstance(block, MTPModule) for block in blocks)
    for index, (block, *parts) in enumerate(groups):
        later, earlier = groups[index + 1 : min(index + 1 + ahead, layers)], groups[max(0, index - ahead) : index][::-1]
        block.set_modules_to_forward_prefetch([*parts, *itertools.chain(*later)])
        block.set_modules_to_backward_prefetch([*parts[::-1], *itertools.chain(*earlier)])


def _groups(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
