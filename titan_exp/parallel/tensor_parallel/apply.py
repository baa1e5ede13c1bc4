"""Tensor parallelism: shards the modules of a model by the style that each has, or its block's `tp_plan()` gives it."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.autograd import local_tensor
from titan_exp.ops.cross_entropy import VocabShard
from titan_exp.parallel.collectives import all_reduce, partial_parameters
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.tensor_parallel.layers import ColumnParallelLinear, TensorParallelGroup
from titan_exp.parallel.tensor_parallel.styles import LINEARS, MODULES, Part, Ranks


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
    ranks = Ranks(axis, region, mesh.fsdp_mesh.size(mesh.fsdp_mesh.ndim - 1), loss_parallel)
    for name, module in list(model.named_modules()):
        if hasattr(module, "tp_plan"):
            for child, style in module.tp_plan().items():  # type: ignore[operator]  # the blocks' own method
                LINEARS[type(style)](style, Part(ranks, module, child, module.get_submodule(child)))
        style = getattr(module, "tp_style", None)
        if style is not None:
            MODULES[type(style)](style, Part(ranks, model, name, module))


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
