"""FSDP2 all-gather hooks that send weights in another dtype (for example float8).

FSDP2 expects such hooks on a tensor subclass, which optimizers and checkpoints would then see too. Here they are
attributes of the plain shards.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from titan_exp.parallel.fsdp.gradient_sync import fsdp_state, parameter_groups

Gathering = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]
"""Encoding and decoding of a weight. The first function maps a shard and the compute dtype to the sent tensor of the
same shape; the second, called once, maps the gathered tensor to the weight, sharing its memory."""


def set_all_gather_format(model: nn.Module, choose: Callable[[nn.Module], Gathering | None]) -> None:
    """Gather each module's `weight` in the format that `choose` returns for the module; None keeps FSDP2's.

    Call it on a materialized model. Skips unsharded weights, and weights sharded unevenly or by columns.
    """
    for parameter in _fsdp_parameters(model):
        info = parameter._module_info
        # Every rank must choose the same format, so this depends on the whole shape.
        even = parameter._orig_size[0] % parameter.mesh_info.shard_mesh_size == 0
        even = even and parameter.fsdp_placement.dim == 0
        gathering = choose(info.module) if info.param_name == "weight" and even else None
        if gathering is None:
            continue
        _attach(parameter._sharded_local_tensor, gathering)
        parameter._init_extensions()


def _fsdp_parameters(model: nn.Module) -> Iterator[Any]:
    # Modules of one group share a state.
    states = dict.fromkeys(fsdp_state(module) for module in model.modules() if isinstance(module, FSDPModule))
    for state in states:
        for group in parameter_groups(state):
            yield from group.fsdp_params


def _attach(shard: Any, gathering: Gathering) -> None:
    encode, decode = gathering

    def pre_all_gather(
        mesh: Any, size: Any, stride: Any, module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (encode(shard.detach(), policy.param_dtype or shard.dtype),), None

    def post_all_gather(gathered: tuple[Tensor, ...], _: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        # Later gathers refill the memory that the weight is a view of, and pass `out`.
        return None if out is not None else (decode(gathered[0], dtype), gathered)

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather
