"""Optimizers: built by name, the base class of ours, and what an optimizer may do beside the interface of torch's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.schema.component import component, is_builtin
from titan_exp.config.secrets import revealed
from titan_exp.models.parametrization.parameter_scale import ParameterScale
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.parameter_groups import NamedParameter, named_parameters, remember_groups


def build_optimizer(
    parts: Iterable[nn.Module], config: OptimizerConfig, scales: Mapping[str, ParameterScale] = {}
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of this rank's modules, with the scales of a parametrization by name.

    An optimizer is one file in `titan_exp/optim/`, or a module of your own: `Config`, a dataclass that extends
    `OptimizerConfig`, and `build(parameters, config)`, which gets the parameters with their names and roles. Composing
    a configuration imports the module of `Config`, which imports no torch: the file itself, whose `build` imports it
    then, or for one of ours the file that `Config` is imported from. An optimizer may also define `set_grad_scale` to
    clip in its `step`, and `metric_reductions` and `metrics()` to report metrics.

    Raises:
        UserError: the import path cannot be imported, builds no `torch.optim.Optimizer`, or the optimizer cannot shard
            its state like the parameters.
    """
    config = config if is_builtin("optimizer", config.name) else revealed(config, "optimizer")
    return build_named(named_parameters(parts, scales), config)


def build_named(named: Sequence[NamedParameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over parameters with names; raises like `build_optimizer`."""
    optimizer = component("optimizer", config.name).build(named, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        reason = f"it builds a {kind}, which is no torch.optim.Optimizer, whose groups, state and hooks a run uses"
        remedy = f"class {kind}(torch.optim.Optimizer), whose __init__ calls super().__init__(params, defaults)"
        raise UserError("This run cannot be started.", [Violation("optimizer.name", config.name, reason, remedy)])
    remember_groups(optimizer)
    return optimizer


class GroupOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer for plain tensors and DTensors that updates one group of parameters after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, group)
        return loss

    @abstractmethod
    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update parameters of a group, which have gradients."""


def adamw_state(state: dict[str, Tensor], like: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """State of a parameter, filled as by torch's fused AdamW if it is empty; moments in `dtype`, or the parameter's."""
    if not state:
        state["step"] = torch.zeros((), device=local_tensor(like).device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return state


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that scales gradients inside its own `step`, as a fused clip-and-update kernel does."""

    def set_grad_scale(self, factor: Tensor) -> None:
        """Scale the gradients of the next step by a scalar on the device."""
        ...


@runtime_checkable
class UpdatesComputeWeights(Protocol):
    """An optimizer whose `step` takes gradients in the compute dtype and writes the compute weights.

    Others get gradients in the dtype of their parameters. It scales gradients itself, too (`set_grad_scale`): clipping
    them in place would round them.
    """

    def set_compute_weights(self, copies: Mapping[Any, Tensor]) -> None:
        """Compute weights by parameter, with the parameters' strides; none for parameters that compute themselves."""
        ...


def cast_gradients(parameters: Iterable[Tensor]) -> None:
    """Cast gradients to the dtypes of their parameters, one at a time."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


@runtime_checkable
class HasGradientPoint(Protocol):
    """An optimizer whose `step` starts at the gradient's point and ends at the averaged weights."""

    def to_gradient_point(self) -> None:
        """Move the parameters from the averaged weights to where the next gradients are computed; the caller then
        refreshes what is kept of the weights elsewhere."""
        ...
