"""Weights that are gathered in another form than they are kept in, by hooks around FSDP2's all-gather.

FSDP2 takes such hooks from a tensor class; that would be the class of every weight, in optimizers and checkpoints too.
Here they are attributes of the plain shards. What that needs of FSDP2's insides is in this file alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

Gathering = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]
"""Another form of a weight. The first makes of a shard what is sent, of the same shape, given the type that the weight
is computed in. The second, called once, makes the weight of what was gathered, sharing its memory."""


def set_all_gather_format(model: nn.Module, choose: Callable[[nn.Module], Gathering | None]) -> None:
    """Have weights gathered as `choose` says of the module that a weight belongs to; None is as they are.

    Args:
        model: sharded, with memory. Where it is not sharded nothing changes, nor for weights that are divided unevenly
            or by columns.
        choose: the form of a module's `weight`.
    """
    for group in _groups(model):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            gathering = choose(info.module) if info.param_name == "weight" else None
            shard = parameter._sharded_local_tensor
            # Asked of all shards: they are gathered in one form by every rank.
            even = parameter._orig_size[0] % parameter.mesh_info.shard_mesh_size == 0
            even = even and parameter.fsdp_placement.dim == 0
            if gathering is None or not even:
                continue
            _attach(shard, gathering)
            parameter._init_extensions()


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch 2.11
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            yield from groups


def _attach(shard: Any, gathering: Gathering) -> None:
    encode, decode = gathering

    def before(
        mesh: Any, size: Any, stride: Any, module: nn.Module, policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], None]:
        return (encode(shard.detach(), policy.param_dtype or shard.dtype),), None

    def after(gathered: tuple[Tensor, ...], _: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        # Later on the same memory is filled again, of which the weight is a view.
        return None if out is not None else (decode(gathered[0], dtype), gathered)

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after
