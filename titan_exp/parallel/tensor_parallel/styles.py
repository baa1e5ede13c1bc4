"""Handlers of tensor-parallel styles, which change a module, its parameters, its input and its output. A style is plain
data in a spec (`models/spec/tp_plan.py`); a new style is a class there, or beside the spec that uses it, and an entry
here."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from titan_exp.models.blocks.linear import Linear
from titan_exp.models.blocks.transformer import HeadNumbers, RMSNorm, Rope
from titan_exp.models.spec import tp_plan
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.autograd import local_tensor
from titan_exp.ops.cross_entropy import VocabShard
from titan_exp.parallel.mesh import Mesh, all_reduce, mark_partial, partial_parameters
from titan_exp.parallel.tensor_parallel import layers


class ShardedTokens(layers.RegionModule):
    """Takes this rank's part of all tokens, without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to [batch, seq of this rank, width]."""
        return self.region.own_part(x.detach())


class GatheredResult(layers.RegionModule):
    """Gathers results of all tokens from each rank's."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq of this rank, width] to [batch, seq, width]."""
        return self.region.gather_result(x)


class GatheredRopeOrder(layers.RegionModule):
    """Reorders RoPE caches of two streams to the order of gathered tokens: rank by rank, both streams."""

    def forward(self, rope: Rope, first_stream: int) -> Rope:
        """Reorder the caches of all tokens; `first_stream` is this rank's number of tokens in the first stream."""
        degree, found = self.region.degree, []
        for part in rope:
            streams = part.tensor_split([first_stream * degree], dim=1)
            of_ranks = [stream.unflatten(1, (degree, -1)) for stream in streams]
            found.append(torch.cat(of_ranks, dim=2).flatten(1, 2))
        return found[0], found[1]


@dataclass(frozen=True)
class Ranks:
    """Tensor-parallel ranks that share a model."""

    axis: torch.distributed.DeviceMesh
    region: layers.TensorParallelGroup
    shards: int  # data ranks among which FSDP shards every parameter afterwards
    loss_parallel: bool

    def divided(self, weight: Tensor, dim: int) -> nn.Parameter:
        """This rank's shard of a whole weight on the meta device."""
        # src_data_rank=None: each rank slices its own copy, without communication.
        sharded = distribute_tensor(weight.detach(), self.axis, [Shard(dim)], src_data_rank=None)
        return nn.Parameter(sharded, weight.requires_grad)

    def divided_vector(self, vector: nn.Parameter, units: int | None = None) -> tuple[nn.Parameter, slice | None]:
        """This rank's shard of a whole vector, or the whole vector and the rows that this rank uses. FSDP cannot shard
        it unevenly again. Of fewer `units` than ranks, several ranks share each."""
        degree, rank = self.region.degree, self.region.rank
        if units is not None and units < degree:
            rank, degree = rank * units // degree, units
        elif vector.shape[0] % (degree * self.shards) == 0:
            return self.divided(vector, dim=0), None
        rows, rest = divmod(vector.shape[0], degree)
        assert rest == 0, "checked by the rules"
        return vector, slice(rank * rows, (rank + 1) * rows)


@dataclass(frozen=True)
class Part:
    """Module of a model that is to be sharded, and its place in the model."""

    ranks: Ranks
    parent: nn.Module  # module that contains it: the model, or the module whose `tp_plan()` names it
    name: str
    module: nn.Module

    @property
    def region(self) -> layers.TensorParallelGroup:
        """Collectives, degree and index of this rank."""
        return self.ranks.region

    def replace(self, module: nn.Module) -> None:
        """Put another module in its place."""
        self.parent.set_submodule(self.name, module)


def _vocabulary_rows(_: tp_plan.VocabEmbedding, part: Part) -> None:
    weight = part.ranks.divided(part.module.get_parameter("weight"), dim=0)
    first = part.region.rank * -(-weight.shape[0] // part.region.degree)
    part.replace(layers.VocabParallelEmbedding(weight, part.region, first))


def _vocabulary_logits(style: tp_plan.VocabLogits, part: Part) -> None:
    tied = part.module.weight is None
    weight = None if tied else part.ranks.divided(part.module.get_parameter("weight"), dim=0)
    whole = None if part.ranks.loss_parallel else style.vocabulary
    part.replace(layers.VocabParallelHead(weight, part.region, whole))


def _numbers_of_heads(_: tp_plan.HeadSharded, part: Part) -> None:
    """Replace a module's numbers per head by those of this rank's heads."""
    assert isinstance(part.module, HeadNumbers), "the style is one of such modules"
    for name, whole in list(part.module.named_parameters(recurse=False)):
        parameter, rows = part.ranks.divided_vector(whole)
        setattr(part.module, name, parameter)
        if rows is not None:
            part.module.rows[name] = rows
    if part.module.rows:
        mark_partial(part.module, *part.module.rows)


def _norm_across_heads(style: tp_plan.AcrossHeads, part: Part) -> None:
    weight, rows = part.ranks.divided_vector(part.module.get_parameter("weight"), style.heads)
    assert isinstance(part.module, RMSNorm), "the style is one of norms"
    norm = layers.RMSNormAcrossRanks(weight, part.region, part.module.eps, rows)
    if rows is not None:
        mark_partial(norm)
    part.replace(norm)


def _used_by_token(_: tp_plan.SequenceParallel, part: Part) -> None:
    if part.region.sequence:
        mark_partial(part.module)


def _whole_tokens(_: tp_plan.WholeTokens, part: Part) -> None:
    def keep_own(_: nn.Module, __: Any, output: Any) -> Any:
        own = part.region.own_tokens
        return (own(output[0]), *output[1:]) if isinstance(output, tuple) else own(output)

    if part.region.sequence:
        _gather_before(part)
        part.module.register_forward_hook(keep_own)
        mark_partial(part.module)


def _gather_before(part: Part) -> None:
    """Gather the hidden states among a module's arguments over all tokens."""
    part.module.register_forward_pre_hook(partial(_gather_hidden_states, part.region), with_kwargs=True)


def _with_sequence_parallelism(kind: Callable[[layers.TensorParallelGroup], nn.Module]) -> "Handler":
    """Handler that replaces an identity by a module of this kind under sequence parallelism."""

    def replace(_: tp_plan.TPStyle, part: Part) -> None:
        if part.region.sequence:
            part.replace(kind(part.region))

    return replace


def _replicated_linear(_: tp_plan.SequenceParallel, part: Part) -> None:
    if part.region.sequence:
        for input_sharded in (True, False):
            _shard_matmul(part, input_sharded=input_sharded)
        mark_partial(part.module)


def _row_parallel(style: tp_plan.Rowwise, part: Part) -> None:
    linear, weight = _shard_matmul(part, input_sharded=True), part.module.get_parameter("weight")
    divided, splits = part.ranks.divided(weight, dim=1), style.splits_input
    if style.gathers:
        whole, splits = part.parent.get_submodule(style.gathers), True
        features = weight.shape[1]
        whole.register_forward_pre_hook(lambda _, args: (part.region.gather_outputs(args[0], features), *args[1:]))
    sharded = layers.RowParallelLinear(divided, part.region, linear.linear_impl, linear.bias, splits_input=splits)
    if linear.bias is not None and part.region.sequence:
        mark_partial(sharded, "bias")
    part.replace(sharded)


def _column_parallel(style: tp_plan.Colwise, part: Part) -> None:
    linear, region = _shard_matmul(part, input_sharded=False), part.region
    weight, bias = part.module.get_parameter("weight"), linear.bias
    assert style.divides(region.degree), "checked by the rules"
    if style.is_replicated(region.degree):
        _replicate_units(style, part, linear)
        return
    divided = part.ranks.divided(weight, dim=0)
    vector, bias_rows = (None, None) if bias is None else part.ranks.divided_vector(bias)
    if style.vector:
        columns: nn.Module = layers.VectorParallelLinear(divided, region, vector, bias_rows)
    else:
        columns = layers.ColumnParallelLinear(
            divided,
            region,
            linear.linear_impl,
            bias=vector,
            bias_rows=None if bias_rows is None else (bias_rows,),
            gathers=style.gathers,
            whole_outputs=weight.shape[0] if style.gathers_output else None,
        )
    if bias_rows is not None:
        mark_partial(columns, "bias")
    part.replace(columns)


def _replicate_units(style: tp_plan.Colwise, part: Part, linear: Linear) -> None:
    """Replicate a weight whose units are shared by several ranks, each computing with the rows of its pieces."""
    common, region = style.common, part.region
    assert common is not None, "only units with a split are replicated"
    rows_of = _gate_up_rows_of if isinstance(common, tp_plan.ReplicatedGateUp) else _rows_of
    rows = tuple(rows_of(region, linear.out_features // style.units, style.units, common))  # type: ignore[arg-type]
    weight, gathers = linear.get_parameter("weight"), style.gathers
    shared = layers.ColumnParallelLinear(
        weight, region, linear.linear_impl, rows, bias=linear.bias, bias_rows=rows, gathers=gathers
    )
    mark_partial(shared)
    part.replace(shared)
    setattr(part.parent, common.count, common.pieces * style.units // region.degree)


def _shard_matmul(part: Part, *, input_sharded: bool) -> Linear:
    assert isinstance(part.module, Linear), "checked by the module requirements"
    amax_reduce = partial(all_reduce, operation="max", group=part.region.group)
    part.module.linear_impl.shard(input_sharded=input_sharded, amax_reduce=amax_reduce)
    return part.module


def _gather_hidden_states(
    region: layers.TensorParallelGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (region.gather_input(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": region.gather_input(kwargs["hidden_states"])}


def _rows_of(
    region: layers.TensorParallelGroup, unit: int, units: int, common: tp_plan.ReplicatedKV
) -> Iterator[slice]:
    """Rows that this rank uses of a weight with `units` units of `unit` rows each, fewer units than ranks."""
    sharing = region.degree // units
    assert region.degree % units == 0, "checked by the rules"
    assert common.pieces % sharing == 0, "checked by the rules"
    start, share = region.rank // sharing * unit, common.pieces // sharing * common.width
    yield slice(start + region.rank % sharing * share, start + (region.rank % sharing + 1) * share)
    yield slice(start + common.pieces * common.width, start + unit)


def _gate_up_rows_of(
    region: layers.TensorParallelGroup, unit: int, units: int, common: tp_plan.ReplicatedGateUp
) -> Iterator[slice]:
    """Gate rows, then up rows, that this rank uses of a weight with `units` groups of `unit` rows each."""
    assert unit == 2 * common.pieces, "a group has as many gate rows as up rows"
    channels, rest = divmod(units * common.pieces, region.degree)
    assert rest == 0, "checked by the rules"
    first, end = region.rank * channels, (region.rank + 1) * channels
    for half in (0, common.pieces):
        for group in range(first // common.pieces, -(-end // common.pieces)):
            start = max(first - group * common.pieces, 0)
            stop = min(end - group * common.pieces, common.pieces)
            yield slice(group * unit + half + start, group * unit + half + stop)


Handler = Callable[[Any, Part], None]  # shards a module by its style

LINEARS: dict[type[tp_plan.TPStyle], Handler] = {
    tp_plan.Colwise: _column_parallel,
    tp_plan.Rowwise: _row_parallel,
    tp_plan.SequenceParallel: _replicated_linear,
}
"""Handlers of linears, by their style in `tp_plan()`."""

MODULES: dict[type[tp_plan.TPStyle], Handler] = {
    tp_plan.VocabEmbedding: _vocabulary_rows,
    tp_plan.VocabLogits: _vocabulary_logits,
    tp_plan.SequenceParallel: _used_by_token,
    tp_plan.HeadParallel: lambda _, part: mark_partial(part.module),
    tp_plan.AcrossHeads: _norm_across_heads,
    tp_plan.HeadSharded: _numbers_of_heads,
    tp_plan.GatherInput: lambda _, part: _gather_before(part),
    tp_plan.WholeTokens: _whole_tokens,
    tp_plan.GatherTokens: lambda _, part: part.replace(layers.GatheredTokens(part.region)),
    tp_plan.ShardTokens: _with_sequence_parallelism(ShardedTokens),
    tp_plan.GatherResult: _with_sequence_parallelism(GatheredResult),
    tp_plan.GatheredOrder: _with_sequence_parallelism(GatheredRopeOrder),
}
"""Handlers of modules, by their `tp_style`."""


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, *, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Replace linears, embedding and head by their sharded versions, in place; parameter names stay. Sequence
    parallelism splits each sequence unless the model's `spec` allows otherwise."""
    axis = mesh.sharding["tp"]
    if axis.size() == 1:
        return
    group = axis.get_group()
    spec: ModelSpec | None = getattr(model, "spec", None)
    of_rank = axis.size(), axis.get_local_rank(), sequence_parallel, spec is None or spec.computes_per_sequence
    # Beside NCCL, gloo is for a CPU only; a fake process group stands for NCCL's.
    as_bytes = mesh.device.type == "cpu" and torch.distributed.get_backend(group) != "fake"
    region = layers.TensorParallelGroup(group.group_name, *of_rank, float8_as_bytes=as_bytes)
    ranks = Ranks(axis, region, mesh.fsdp_mesh.size(mesh.fsdp_mesh.ndim - 1), loss_parallel)
    for name, module in list(model.named_modules()):
        if hasattr(module, "tp_plan"):
            for child, style in module.tp_plan().items():  # type: ignore[operator]  # the blocks' own method
                LINEARS[type(style)](style, Part(ranks, module, child, module.get_submodule(child)))
        style = getattr(module, "tp_style", None)
        if style is not None:
            MODULES[type(style)](style, Part(ranks, model, name, module))


def drop_unused_rows(model: nn.Module) -> dict[str, tuple[slice, ...]]:
    """Drop the rows of replicated weights that this rank does not use, in place (inference only). The model is on the
    meta device. Returns the kept rows by weight name, since these weights are not DTensors."""
    kept: dict[str, tuple[slice, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, layers.ColumnParallelLinear) and module.rows is not None:
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
    """Sum gradients of replicated parameters that tensor-parallel ranks used in part, once a step, in one message."""
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
        torch.distributed.all_reduce(flat, group=mesh.tp_group)
        for gradient, summed in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
