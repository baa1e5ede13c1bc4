"""Gradients of a sharded pipeline stage, reduced once, when the schedule says so and not when autograd ends.

FSDP2 has no public call for this; what of its insides is needed is in this file alone.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from titan_exp.parallel.step_observer import step_observer


def disable_gradient_sync(module: nn.Module, *, keep_gathered: bool) -> None:
    """From here on backward passes add to unreduced gradients.

    Args:
        module: a stage; nothing to do where it is not sharded.
        keep_gathered: whether parameters stay gathered until `reduce_gradients`.
    """
    if isinstance(module, FSDPModule):
        module.set_is_last_backward(False)
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(not keep_gathered)


def accumulate_gradients(module: nn.Module) -> None:
    """Take what autograd has added without FSDP's hooks to the sum, which is in the type of the reduction."""
    if isinstance(module, FSDPModule):
        for group in _parameter_groups(module):
            if hasattr(group, "_set_unsharded_grad_dtypes"):  # torch 2.15: autograd adds in the reduction's type
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
        for group in _parameter_groups(module):
            observer.group_reduction_begin()
            group.post_backward()
        observer.stage_reduction_end()
        _state(module)._root_post_backward_final_callback()


def _parameter_groups(module: FSDPModule) -> Iterator[Any]:
    for state in _state(module)._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


def _state(module: FSDPModule) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]
