"""Tensor parallelism. Shards each block's linear layers according to the block's `tp_plan()`."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from titan_exp.models.blocks.linear import Linear
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.tp_plan import (
    Colwise,
    GatheredOrder,
    GatherInput,
    GatherResult,
    GatherTokens,
    HeadParallel,
    HeadSharded,
    ReplicatedGateUp,
    ReplicatedKV,
    Rowwise,
    SequenceParallel,
    ShardTokens,
    VocabEmbedding,
    VocabLogits,
)
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.ops.loss.vocab_parallel import VocabShard
from titan_exp.parallel.functional_collectives import all_reduce
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.partial_gradients import mark_partial, partial_parameters
from titan_exp.parallel.tensor_parallel.collectives import TensorParallelGroup
from titan_exp.parallel.tensor_parallel.layers import (
    ColumnParallelLinear,
    GatheredTokens,
    RowParallelLinear,
    VectorParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from titan_exp.parallel.tensor_parallel.token_order import GatheredResult, GatheredRopeOrder, ShardedTokens

TOKEN_MODULES = {ShardTokens: ShardedTokens, GatherResult: GatheredResult, GatheredOrder: GatheredRopeOrder}
"""Modules of sequence parallelism for text and image tokens, by the style of the identity that they replace."""


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Replace linears, embedding and head by their sharded versions, in place; parameter names stay.

    Does nothing if the tp axis has size 1. Sequence parallelism splits each sequence if the model's `spec` asks for it,
    or if it has none.
    """
    axis = mesh.sharding["tp"]
    if axis.size() == 1:
        return
    group = axis.get_group()
    spec: ModelSpec | None = getattr(model, "spec", None)
    of_rank = axis.size(), axis.get_local_rank(), sequence_parallel, spec is None or spec.computes_per_sequence
    # Beside NCCL, gloo is for a CPU only; a fake process group stands for NCCL's.
    as_bytes = mesh.device.type == "cpu" and dist.get_backend(group) != "fake"
    region = TensorParallelGroup(group.group_name, *of_rank, float8_as_bytes=as_bytes)
    shards = mesh.fsdp_mesh.size(mesh.fsdp_mesh.ndim - 1)
    for name, module in list(model.named_modules()):
        if hasattr(module, "tp_plan"):
            for child, style in module.tp_plan().items():  # type: ignore[operator]  # the blocks' own method
                _shard_linear(module, child, style, axis, region, shards=shards)
        match getattr(module, "tp_style", None):
            case VocabEmbedding():
                weight = _divided(module.get_parameter("weight"), axis, dim=0)
                first = region.rank * -(-weight.shape[0] // region.degree)
                model.set_submodule(name, VocabParallelEmbedding(weight, region, first))
            case VocabLogits(vocabulary):
                weight = None if module.weight is None else _divided(module.get_parameter("weight"), axis, dim=0)
                model.set_submodule(name, VocabParallelHead(weight, region, None if loss_parallel else vocabulary))
            case HeadSharded():
                _shard_heads(module, axis, shards)
            case GatherTokens():
                model.set_submodule(name, GatheredTokens(region))
            case ShardTokens() | GatherResult() | GatheredOrder() as style if sequence_parallel:
                model.set_submodule(name, TOKEN_MODULES[type(style)](region))
            case GatherInput():
                module.register_forward_pre_hook(partial(_gather_hidden_states, region), with_kwargs=True)
            case SequenceParallel() if sequence_parallel:
                mark_partial(module)
            case HeadParallel():
                mark_partial(module)


def drop_unused_rows(model: nn.Module) -> dict[str, tuple[slice, ...]]:
    """Drop the rows of replicated weights that this rank does not use, in place (inference only).

    For a model on the meta device. Returns the kept rows by the weight's name, since the weight is no DTensor.
    """
    kept: dict[str, tuple[slice, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear) and module.rows is not None:
            for key, parameter in dict(module.named_parameters(recurse=False)).items():
                kept[f"{name}.{key}"] = module.rows
                setattr(module, key, nn.Parameter(torch.cat([parameter.detach()[rows] for rows in module.rows])))
            module.rows = module.bias_rows = None
    return kept


def enable_async_tp(mesh: Mesh) -> None:
    """Let the compiler split tensor-parallel collectives and overlap them with matmuls (CUDA only)."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.sharding["tp"].get_group().group_name)
    inductor._micro_pipeline_tp = True


def vocab_shard(mesh: Mesh, vocabulary: int) -> VocabShard | None:
    """Vocabulary shard of this rank's logits under loss parallelism; None without tensor parallelism."""
    axis = mesh.sharding["tp"]
    if axis.size() == 1:
        return None
    group = axis.get_group().group_name
    return VocabShard(
        axis.get_local_rank() * -(-vocabulary // axis.size()),
        all_reduce_sum=partial(all_reduce, operation="sum", group=group),
        all_reduce_max=partial(all_reduce, operation="max", group=group),
    )


@torch.no_grad()
def reduce_partial_gradients(parts: Iterable[nn.Module], mesh: Mesh) -> None:
    """Sum gradients over tensor-parallel ranks for replicated parameters that each rank used only in part.

    Called once per optimizer step after the last backward pass; sends one message.
    """
    if mesh.tp_group is None:
        return
    gradients = [
        local_tensor(gradient)
        for part in parts
        for module in part.modules()
        for gradient in (parameter.grad for parameter in partial_parameters(module))
        if gradient is not None
    ]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=mesh.tp_group)
        for gradient, summed in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _shard_linear(
    block: nn.Module, name: str, style: object, axis: DeviceMesh, region: TensorParallelGroup, *, shards: int
) -> None:
    linear = block.get_submodule(name)
    assert isinstance(linear, Linear), "checked by the module requirements"
    weight, bias, linear_impl = linear.get_parameter("weight"), linear.bias, linear.linear_impl
    amax_reduce = partial(all_reduce, operation="max", group=region.group)
    if isinstance(style, SequenceParallel):
        if region.sequence:
            for input_sharded in (True, False):
                linear_impl.shard(input_sharded=input_sharded, amax_reduce=amax_reduce)
            mark_partial(linear)
        return
    linear_impl.shard(input_sharded=isinstance(style, Rowwise), amax_reduce=amax_reduce)
    if isinstance(style, Rowwise):
        divided, splits = _divided(weight, axis, dim=1), style.splits_input
        if style.gathers:
            whole, splits = block.get_submodule(style.gathers), True
            whole.register_forward_pre_hook(partial(_gather_features, region, weight.shape[1]))
        sharded = RowParallelLinear(divided, region, linear_impl, bias, splits_input=splits)
        if bias is not None and region.sequence:
            mark_partial(sharded, "bias")
        block.set_submodule(name, sharded)
        return
    assert isinstance(style, Colwise), "a linear layer is sharded by columns or by rows"
    assert style.divides(region.degree), "checked by the rules"
    if not style.is_replicated(region.degree):
        divided = _divided(weight, axis, dim=0)
        part, bias_rows = (None, None) if bias is None else _divided_vector(bias, axis, shards)
        if style.vector:
            columns: nn.Module = VectorParallelLinear(divided, region, part, bias_rows)
        else:
            outputs = weight.shape[0] if style.gathers_output else None
            columns = ColumnParallelLinear(
                divided,
                region,
                linear_impl,
                bias=part,
                bias_rows=None if bias_rows is None else (bias_rows,),
                gathers=style.gathers,
                whole_outputs=outputs,
            )
        if bias_rows is not None:
            mark_partial(columns, "bias")
        block.set_submodule(name, columns)
        return
    assert style.common is not None, "only units with a split are replicated"
    unit = weight.shape[0] // style.units
    if isinstance(style.common, ReplicatedGateUp):
        rows = tuple(_gate_up_rows_of(region, unit, style.units, style.common))
    else:
        rows = tuple(_rows_of(region, unit, style.units, style.common))
    shared = ColumnParallelLinear(weight, region, linear_impl, rows, bias=bias, bias_rows=rows, gathers=style.gathers)
    mark_partial(shared)
    block.set_submodule(name, shared)
    setattr(block, style.common.count, style.common.pieces * style.units // region.degree)


def _gather_hidden_states(
    region: TensorParallelGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a module with the hidden states of all tokens."""
    if args:
        return (region.gather_input(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": region.gather_input(kwargs["hidden_states"])}


def _gather_features(
    region: TensorParallelGroup, features: int, _: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Arguments of a module with the features of all ranks as the first."""
    return (region.gather_outputs(args[0], features), *args[1:])


def _rows_of(region: TensorParallelGroup, unit: int, units: int, common: ReplicatedKV) -> Iterator[slice]:
    """This rank's rows of a weight with `units` units of `unit` rows each, fewer units than ranks."""
    sharing = region.degree // units
    assert region.degree % units == 0, "checked by the rules"
    assert common.pieces % sharing == 0, "checked by the rules"
    start, share = region.rank // sharing * unit, common.pieces // sharing * common.width
    yield slice(start + region.rank % sharing * share, start + (region.rank % sharing + 1) * share)
    yield slice(start + common.pieces * common.width, start + unit)


def _gate_up_rows_of(region: TensorParallelGroup, unit: int, units: int, common: ReplicatedGateUp) -> Iterator[slice]:
    """This rank's gate rows, then its up rows, of a weight with `units` groups of `unit` rows each."""
    assert unit == 2 * common.pieces, "a group has as many gate rows as up rows"
    channels, rest = divmod(units * common.pieces, region.degree)
    assert rest == 0, "checked by the rules"
    first, end = region.rank * channels, (region.rank + 1) * channels
    for half in (0, common.pieces):
        for group in range(first // common.pieces, -(-end // common.pieces)):
            start = max(first - group * common.pieces, 0)
            stop = min(end - group * common.pieces, common.pieces)
            yield slice(group * unit + half + start, group * unit + half + stop)


def _shard_heads(module: nn.Module, axis: DeviceMesh, shards: int) -> None:
    """Give a module of one number per head this rank's heads."""
    weight, rows = _divided_vector(module.get_parameter("weight"), axis, shards)
    module.weight, module.rows = weight, rows  # type: ignore[assignment]  # a plain attribute
    if rows is not None:
        mark_partial(module)


def _divided_vector(vector: nn.Parameter, axis: DeviceMesh, shards: int) -> tuple[nn.Parameter, slice | None]:
    """This rank's shard of a whole vector; or the whole vector and the rows that this rank uses.

    FSDP cannot shard unevenly what is sharded already, and a vector has no other dim.
    """
    if vector.shape[0] % (axis.size() * shards) == 0:
        return _divided(vector, axis, dim=0), None
    rows, rest = divmod(vector.shape[0], axis.size())
    assert rest == 0, "checked by the rules"
    return vector, slice(axis.get_local_rank() * rows, (axis.get_local_rank() + 1) * rows)


def _divided(weight: Tensor, axis: DeviceMesh, dim: int) -> nn.Parameter:
    """This rank's shard of a whole weight on the meta device."""
    # src_data_rank=None: each rank slices its own copy, without communication.
    sharded = distribute_tensor(weight.detach(), axis, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(sharded, weight.requires_grad)
