"""Gradient reduction of FSDP2: in the last backward pass of a step, or of a pipeline stage when its schedule asks.

FSDP2 has no public call for this; its private parts are used in this package only.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from titan_exp.parallel.step_observer import step_observer


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


def accumulate_gradients(module: nn.Module) -> None:
    """Add gradients that autograd accumulated outside FSDP's hooks to the unreduced sum, in the reduction dtype."""
    if isinstance(module, FSDPModule):
        for group in _parameter_groups(module):
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
        for group in _parameter_groups(module):
            observer.group_reduction_begin()
            group.post_backward()
        observer.stage_reduction_end()
        fsdp_state(module)._root_post_backward_final_callback()


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
    for state in fsdp_state(module)._state_ctx.all_states:
        yield from parameter_groups(state)
