"""Gradient reduction of FSDP2: in the last backward pass of a step, or of a pipeline stage when its schedule asks.

FSDP2 has no public call for this; its private parts are used in this package only.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from titan_exp.models.blocks.transformer import iter_blocks
from titan_exp.parallel.step_observer import step_observer


class _One(float):
    """Divide factor of 1 that leaves tensors as they are: FSDP2 on one shard (DDP) divides even by 1, into a copy."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__truediv__ or func is Tensor.div or func is Tensor.true_divide:
            return args[0]
        return func(*(float(arg) if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over data ranks instead of averaging them, without a division."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(_One(1))
            # Else the factor becomes part of the reduction op, which gloo does not support.
            module.set_force_sum_reduction_for_comms(True)


def accumulate_in_compute_dtype(model: nn.Module) -> None:
    """Let autograd sum unreduced gradients in the dtype in which they are computed, without a cast."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(fsdp_state(module)):
                if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15
                    group._set_unsharded_grad_dtypes = partial(_keep_compute_dtype, group)
                for parameter in group.fsdp_params:
                    parameter.to_accumulated_grad_if_needed = lambda: None


def _keep_compute_dtype(group: Any, **_: Any) -> None:
    """Let autograd keep gradients in the dtype of gathered parameters, where torch 2.15 has that of the reduction."""
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
    """Let backward passes prefetch by the order of one forward pass.

    FSDP2 appends the orders of all micro-batches of a step: the first group's backward pass would gather the last group
    of another micro-batch.
    """
    if isinstance(module, FSDPModule):
        # Absent before the first pass.
        getattr(fsdp_state(module)._comm_ctx, "post_forward_order", []).clear()


def accumulate_gradients(module: nn.Module) -> None:
    """Add gradients that autograd accumulated outside FSDP's hooks to the unreduced sum, in the reduction dtype."""
    if isinstance(module, FSDPModule):
        observer = step_observer()
        for groups in _groups_by_block(module):
            observer.gradient_group_begin()
            for group in groups:
                _accumulate_group(group)


def _accumulate_group(group: Any) -> None:
    if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15: autograd adds in the reduction dtype
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        return
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
    """Gather and free the parameters of a unit around the calls of a module that contains it, not its own."""
    state = fsdp_state(unit)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)


def fsdp_state(module: FSDPModule) -> Any:
    """FSDP2's private state of a module."""
    return fully_shard.state(module)  # type: ignore[attr-defined]


def parameter_groups(state: Any) -> list[Any]:
    """FSDP2's private parameter groups of a module's state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return groups


def _parameter_groups(module: FSDPModule) -> Iterator[Any]:
    # Modules that share a group share a state, which torch 2.11 lists once for each.
    for state in dict.fromkeys(fsdp_state(module)._state_ctx.all_states):
        yield from parameter_groups(state)


def _groups_by_block(module: FSDPModule) -> Iterator[list[Any]]:
    """Parameter groups outside of blocks, if any, then those of each block."""
    assert isinstance(module, nn.Module)
    states = [
        [fsdp_state(part) for part in block.modules() if isinstance(part, FSDPModule)] for block in iter_blocks(module)
    ]
    by_block = [[group for state in of_block for group in parameter_groups(state)] for of_block in states]
    in_blocks = {id(group) for groups in by_block for group in groups}
    if others := [group for group in _parameter_groups(module) if id(group) not in in_blocks]:
        yield others
    yield from by_block
