"""Data parallelism by FSDP2's `fully_shard`; HSDP and DDP are the same call on other meshes. Gradients are summed over
data ranks, never averaged: the loss is already divided by the tokens of the global batch. DDP is HSDP with unsharded
parameters."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from titan_exp.models.blocks.transformer import MTPModule, iter_blocks
from titan_exp.models.spec.model_spec import PipelinePlan
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.expert_parallel import mixtures
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import matching_modules
from titan_exp.parallel.step_observer import step_observer


class _One(float):
    """Divide factor that leaves tensors as they are. With one shard, FSDP2 would divide even by 1, into a copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__truediv__ or func is Tensor.div or func is Tensor.true_divide:
            return args[0]
        return func(*(float(arg) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over data ranks instead of averaging them."""
    for module in _groups(model):
        module.set_gradient_divide_factor(_One(1))
        # Without this, the factor becomes part of the reduction op, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)


def accumulate_in_compute_dtype(model: nn.Module) -> None:
    """Let autograd sum unreduced gradients in the dtype in which they are computed, without a cast."""
    for group in [group for module in _groups(model) for group in parameter_groups(fsdp_state(module))]:
        if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
            group._set_unsharded_grad_dtypes = partial(_keep_compute_dtype, group)
        for parameter in group.fsdp_params:
            parameter.to_accumulated_grad_if_needed = lambda: None


def _keep_compute_dtype(group: Any, **_: Any) -> None:
    """Let autograd keep gradients in the dtype of gathered parameters, not of the reduction (torch 2.15)."""
    for parameter in group.fsdp_params:
        if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
            gathered.grad_dtype = gathered.dtype


def set_gradient_sync(model: nn.Module, *, last: bool) -> None:
    """Reduce gradients in the next backward pass only if it is the last of the optimizer step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def disable_gradient_sync(module: nn.Module, *, keep_gathered: bool) -> None:
    """Accumulate unreduced gradients, and keep parameters gathered until `reduce_gradients` if `keep_gathered`."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(not keep_gathered)


def restart_forward_order(module: nn.Module) -> None:
    """Let backward passes prefetch by the order of one forward pass. FSDP2 appends the orders of all micro-batches of a
    step, so that the first group's backward pass would gather the last group of another micro-batch."""
    if isinstance(module, FSDPModule):
        # The attribute is absent before the first pass.
        getattr(fsdp_state(module)._comm_ctx, "post_forward_order", []).clear()


def accumulate_gradients(module: nn.Module) -> None:
    """Add gradients that autograd accumulated outside FSDP's hooks to the unreduced sum, in the reduction dtype."""
    if not isinstance(module, FSDPModule):
        return
    for groups in _groups_by_block(module):
        step_observer().gradient_group_begin()
        for group in groups:
            if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15: autograd adds in the reduction dtype
                group._set_unsharded_grad_dtypes(defer_upcast=False)
                continue
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def reduce_gradients(module: nn.Module) -> None:
    """Reduce a stage's gradients over its data ranks, and free its gathered parameters."""
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(True)
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        observer = step_observer()
        for groups in _groups_by_block(module):
            observer.group_reduction_begin()
            for group in groups:
                group.post_backward()
        observer.stage_reduction_end()
        fsdp_state(module)._root_post_backward_final_callback()


def move_forward_hooks(unit: FSDPModule, module: nn.Module) -> None:
    """Gather and free a unit's parameters around the calls of a module that contains it, instead of its own calls."""
    state = fsdp_state(unit)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    hook = module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    state._pre_forward_hook_handle = hook
    state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)


def fsdp_state(module: FSDPModule) -> Any:
    """FSDP2's private state of a module."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def parameter_groups(state: Any) -> list[Any]:
    """FSDP2's private parameter groups of a module's state."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # torch 2.11


def _groups_by_block(module: FSDPModule) -> Iterator[list[Any]]:
    """Parameter groups outside of blocks, if any, then the groups of each block."""
    assert isinstance(module, nn.Module)
    by_block = [
        [group for part in _groups(block) for group in parameter_groups(fsdp_state(part))]
        for block in iter_blocks(module)
    ]
    in_blocks = {id(group) for groups in by_block for group in groups}
    # Modules of one group share a state, which torch 2.11 lists once per module.
    every = [
        group for state in dict.fromkeys(fsdp_state(module)._state_ctx.all_states) for group in parameter_groups(state)
    ]
    if others := [group for group in every if id(group) not in in_blocks]:
        yield others
    yield from by_block


Gathering = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]
"""Encoding and decoding of a weight. The first function maps a shard and the compute dtype to the sent tensor of the
same shape; the second, called once, maps the gathered tensor to the weight, sharing its memory."""


def set_all_gather_format(model: nn.Module, choose: Callable[[nn.Module], Gathering | None]) -> None:
    """Gather each module's `weight` in the format that `choose` returns for the module; None keeps FSDP2's. Call it on
    a materialized model. Skips unsharded weights, and weights sharded unevenly or by columns."""
    # Modules of one group share a state.
    states = dict.fromkeys(fsdp_state(module) for module in _groups(model))
    groups = [group for state in states for group in parameter_groups(state)]
    for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
        info = parameter._module_info
        # Every rank must choose the same format, so this depends on the whole shape.
        even = parameter._orig_size[0] % parameter.mesh_info.shard_mesh_size == 0
        even = even and parameter.fsdp_placement.dim == 0
        gathering = choose(info.module) if info.param_name == "weight" and even else None
        if gathering is None:
            continue
        _attach(parameter._sharded_local_tensor, gathering)
        parameter._init_extensions()


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


def _shard_ends(model: nn.Module, shard: Callable[..., None], *, free: bool) -> list[nn.Module]:
    """Make FSDP groups of the ends of a model or pipeline stage; `free` is False if parameters stay gathered. The first
    children (embedding) are freed after their forward. The last (norm, head) share a group and stay gathered, since
    backward follows their forward at once. A tied weight is kept from the embedding's forward to the head's backward.
    Autograd holds its gradient, of the same size, from there to the embedding's backward, so that freeing it between
    its two uses would lower no peak. Returns the modules that are kept."""
    plan = pipeline_plan(model)
    if plan is None:
        return []
    kept: list[nn.Module] = []
    for name, child in _unshared_children(model, plan.first):
        tied = name in plan.shared
        shard([child], reshard=free and not tied)
        assert isinstance(child, FSDPModule)
        if tied:
            _gather_in_backward_of_head(child)
            kept.append(child)
        elif not getattr(child, "reads_weight_in_backward", True):
            child.set_unshard_in_backward(False)
            # The default would prefetch whatever ran before: the head in the previous micro-batch or evaluation.
            child.set_modules_to_backward_prefetch([child])
    # The norm before a tied head stays with the root: between head and last block it would end FSDP2's prefetching.
    last = [] if plan.shared else [child for _, child in _unshared_children(model, plan.last)]
    if last:
        shard(last, reshard=False)
    return [*kept, *last]


def lookup_tables(model: nn.Module) -> list[nn.Module]:
    """Embeddings of a model or pipeline stage whose weights are only used by lookups on this rank."""
    plan = pipeline_plan(model)
    if plan is None:
        return []
    head = bool(_children(model, plan.last))
    return [
        child
        for name, child in _unshared_children(model, plan.first)
        if hasattr(child, "row_dtype") and not (head and name in plan.shared)
    ]


def pipeline_plan(model: nn.Module) -> PipelinePlan | None:
    """Plan that names the first and last children of a model; None if the model has no plan."""
    plan = model.pp_plan() if hasattr(model, "pp_plan") else None  # type: ignore[operator]  # a method
    return plan if isinstance(plan, PipelinePlan) else None


def _gather_in_backward_of_head(embedding: FSDPModule) -> None:
    """Gather a tied weight for the head's backward if it was freed, but not for a lookup's, which reads no weight.
    FSDP2 knows one policy per module, so hooks tell its calls apart: the head's begin with hidden states."""
    assert isinstance(embedding, nn.Module)

    def gather(_: Tensor) -> None:
        embedding.set_unshard_in_backward(True)
        embedding.unshard()  # FSDP2 gathers it only if no lookup's backward, of another micro-batch, came before

    def register(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not inputs[0].requires_grad:
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(gather)
        inputs[0].register_hook(lambda _: embedding.set_unshard_in_backward(False))

    embedding.set_unshard_in_backward(False)
    embedding.register_forward_hook(register)


def _children(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Children of this stage by name; other stages hold the rest."""
    return {name: child for name in names if isinstance(child := getattr(model, name, None), nn.Module)}


def _unshared_children(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Children whose parameters no other child shares."""
    owners = Counter(parameter for child in model.children() for parameter in child.parameters())
    return [
        (name, child)
        for name, child in _children(model, names).items()
        if any(True for _ in child.parameters()) and all(owners[parameter] == 1 for parameter in child.parameters())
    ]


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
    kept = _shard_ends(model, shard, free=free)
    shard([model], reshard=False)
    groups = [group for part in (*kept, *blocks[-1:]) for group in units.freed(part)]

    def free_after_inference(*_: Any) -> None:
        if not torch.is_grad_enabled():  # kept for backward
            for group in groups:
                group.reshard()

    if free:
        model.register_forward_hook(free_after_inference)
    _prefetch(blocks, options.prefetch_blocks)
    sum_gradients(model)
    if options.bf16_sums:
        accumulate_in_compute_dtype(model)


def uses_fsdp(mesh: Mesh, *, cpu_offload: bool) -> bool:
    """True with several data ranks or offloaded parameters; else `ComputeWeights` keeps low-precision copies."""
    return max(mesh.fsdp_mesh.size(), mesh.expert_fsdp_mesh.size()) > 1 or cpu_offload


def free_gathered(parts: Iterable[nn.Module]) -> None:
    """Free gathered parameters of all units, so that the next pass gathers their current values."""
    for part in parts:
        for unit in _groups(part):
            unit.reshard()


class _Units:
    """FSDP units of a model: blocks and ends. Nested in them are modules in fp32, and experts on a mesh of their own.
    Inputs are not cast: the embedding sets the dtype of the residual stream, and the RoPE cache stays fp32."""

    def __init__(self, model: nn.Module, mesh: Mesh, options: FSDPOptions) -> None:
        dtype = torch.bfloat16 if options.bf16 else None
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if options.cpu_offload else OffloadPolicy()
        self._mesh, self._offload = mesh, offload
        self._policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        self._fp32 = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        self._to_fp32 = replace(self._fp32, output_dtype=dtype)
        self._kept = {module for module in model.modules() if getattr(module, "keeps_fp32", False)}
        """Modules that keep their parameters in fp32 and cast on their own."""
        self._uncast = replace(self._policy, param_dtype=torch.float32)
        outermost = matching_modules(model, options.fp32_modules)
        experts = [] if mesh.experts is None else [mixture.experts for mixture in mixtures(model)]
        self._in_fp32 = {part: part in outermost for module in outermost for part in module.modules()}
        """Modules in fp32; True for those that cast their inputs and outputs."""
        self._of_experts = {part for module in experts for part in module.modules()}
        kept = self._kept if options.bf16 else ()
        self._nested = {*outermost, *experts, *(module for module in kept if module not in self._in_fp32)}

    def shard(self, modules: Sequence[nn.Module], *, reshard: bool) -> None:
        """Make one unit of the modules, and units of the parts nested in them."""
        nested = [part for module in modules for part in module.modules() if part in self._nested]
        for part in reversed(nested):  # the inner ones first
            if not isinstance(part, FSDPModule):
                self._shard(part, part, reshard=reshard)
        if rest := [module for module in modules if module not in nested]:
            self._shard(rest, rest[0], reshard=reshard)

    def gather_with(self, block: nn.Module) -> None:
        """Gather experts and fp32 parameters when their block is called, outside of compiled or recomputed code."""
        own = self._of_experts | self._kept
        for part in block.modules():
            if isinstance(part, FSDPModule) and part in own and part not in self._in_fp32:
                move_forward_hooks(part, block)

    def freed(self, module: nn.Module) -> list[FSDPModule]:
        """Units of a module whose gathered parameters can be freed, since they are sharded."""
        return [part for part in _groups(module) if self._shards(part) > 1]

    def _shard(self, unit: Any, first: nn.Module, *, reshard: bool) -> None:
        policy = self._policy
        if first in self._in_fp32:
            policy = self._to_fp32 if self._in_fp32[first] else self._fp32
        elif first in self._kept:
            policy = self._uncast
        choose = _sharded_dim_of_experts if first in self._of_experts else _sharded_dim
        fully_shard(
            unit,
            mesh=self._mesh_of(first),
            mp_policy=policy,
            shard_placement_fn=partial(choose, degree=self._shards(first)),
            reshard_after_forward=reshard and self._shards(first) > 1,
            offload_policy=self._offload,
        )

    def _mesh_of(self, module: object) -> torch.distributed.DeviceMesh:
        return self._mesh.expert_fsdp_mesh if module in self._of_experts else self._mesh.fsdp_mesh

    def _shards(self, module: object) -> int:
        mesh = self._mesh_of(module)
        return mesh.size(mesh.ndim - 1)


def _sharded_dim_of_experts(parameter: nn.Parameter, degree: int) -> Shard | None:
    """First dim that the degree divides: torch shards only dim 0 of plain tensors unevenly."""
    sizes = local_tensor(parameter.detach()).shape
    dims = [dim for dim, size in enumerate(sizes) if size % degree == 0]
    assert dims or not isinstance(parameter, DTensor), "checked by the rules"
    return Shard(dims[0]) if dims else None


def _sharded_dim(parameter: nn.Parameter, degree: int) -> Shard | None:
    """Dim 0, or dim 1 if tensor parallelism shards dim 0 too and unevenly: torch would shard it wrongly."""
    if not isinstance(parameter, DTensor) or parameter.placements[0] != Shard(0):
        return None
    return None if parameter.shape[0] % (parameter.device_mesh.size() * degree) == 0 else Shard(1)


def _prefetch(blocks: Sequence[nn.Module], ahead: int) -> None:
    """Prefetch blocks; by default FSDP2 prefetches the previous group, perhaps an fp32 module of the same block."""
    groups = [_groups(block) for block in blocks]
    if ahead == 1 and all(len(of_block) == 1 for of_block in groups):
        return
    # An evaluation would gather the MTP modules without running them.
    layers = sum(not isinstance(block, MTPModule) for block in blocks)
    for index, (block, *parts) in enumerate(groups):
        later, earlier = groups[index + 1 : min(index + 1 + ahead, layers)], groups[max(0, index - ahead) : index][::-1]
        block.set_modules_to_forward_prefetch([*parts, *itertools.chain(*later)])
        block.set_modules_to_backward_prefetch([*parts[::-1], *itertools.chain(*earlier)])


def _groups(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
