"""Expert parallelism: each rank of a group keeps other experts, and tokens are sent to them (Lepikhin et al. 2020).

Tensor-parallel ranks route other tokens each, also where experts are not split: so a router's gradient is partial.
"""

from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_exp.models.blocks.feed_forward import MoEFeedForward
from titan_exp.models.blocks.linear import GroupedLinear
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.expert_parallel.dispatch import ExpertParallelDispatch
from titan_exp.parallel.expert_parallel.symmetric_exchange import use_symmetric_memory
from titan_exp.parallel.expert_parallel.token_groups import TokenGroup
from titan_exp.parallel.functional_collectives import all_reduce
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.partial_gradients import mark_partial


def apply_expert_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, symmetric_memory: bool = False
) -> None:
    """Shard experts and replace the dispatch of tokens, in place; parameter names stay.

    Does nothing if experts are sharded over the same ranks as other weights.
    """
    axes = mesh.experts
    if axes is None:
        return
    tp = mesh.sharding["tp"]
    tokens = TokenGroup(tp.get_group().group_name, tp.size(), tp.get_local_rank()) if tp.size() > 1 else None
    ep = axes["ep"]
    if symmetric_memory:
        use_symmetric_memory()
    for module in mixtures(model):
        module.dispatch = ExpertParallelDispatch(
            ep.get_group().group_name,
            ep.size(),
            tokens if axes["etp"].size() > 1 else None,
            symmetric_memory,
        )
        for linear, dim in ((module.experts.gate_up, 1), (module.experts.down, 2)):
            _shard(linear, axes, channels=dim)
            if axes["etp"].size() > 1:
                amax_reduce = partial(all_reduce, operation="max", group=axes["etp"].get_group().group_name)
                linear.linear_impl.shard(input_sharded=dim == 2, amax_reduce=amax_reduce)
        if tokens is not None:
            mark_partial(module.router)
            module.token_split = None if sequence_parallel else tokens


def mixtures(model: nn.Module) -> list[MoEFeedForward]:
    """Mixtures of experts of a model or pipeline stage, in order."""
    return [module for module in model.modules() if isinstance(module, MoEFeedForward)]


def _shard(linear: GroupedLinear, axes: DeviceMesh, *, channels: int) -> None:
    """Shard weights [experts, out, in] over ep by experts, and over etp by the dim of the channels.

    Biases [experts, out] are sharded by outputs over etp: ranks whose outputs are summed each add other ones, once.
    """
    linear.weight = _divided(linear.weight, axes, dim=channels)
    if linear.bias is not None:
        linear.bias = _divided(linear.bias, axes, dim=1)
        if channels == 2:
            local = local_tensor(linear.bias.detach())
            linear.bias_start = axes["etp"].get_local_rank() * local.shape[1]


def _divided(parameter: nn.Parameter, axes: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard of a parameter of experts, over etp by `dim`."""
    placements = {name: shard for name, shard in (("ep", Shard(0)), ("etp", Shard(dim))) if axes[name].size() > 1}
    if not placements:
        return parameter
    # src_data_rank=None: each rank slices its own copy, without communication.
    shards = list(placements.values())
    sharded = distribute_tensor(parameter.detach(), axes[tuple(placements)], shards, src_data_rank=None)
    return nn.Parameter(sharded, parameter.requires_grad)
