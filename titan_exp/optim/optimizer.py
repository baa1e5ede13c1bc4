"""Optimizers: built by name, the base class of our own, and abilities that torch's interface lacks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.schema.component import component, is_builtin
from titan_exp.config.secrets import revealed
from titan_exp.models.parametrization.standard import ParameterScale
from titan_exp.ops.autograd import local_tensor
from titan_exp.optim.parameter_groups import NamedParameter, named_parameters, remember_groups


def build_optimizer(
    parts: Iterable[nn.Module], config: OptimizerConfig, scales: Mapping[str, ParameterScale] = {}
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of this rank's modules, with the scales of a parametrization by name.

    An optimizer is one file in `titan_exp/optim/`, or a module of your own: `Config`, a dataclass that extends
    `OptimizerConfig`, and `build(parameters, config)`, which gets the parameters with their names and roles. Composing
    a configuration imports the module that defines `Config`, so that module must not import torch. If `Config` is in
    the optimizer's own file, `build` imports torch. An optimizer may also define `set_grad_scale` to clip in its
    `step`, and `metric_reductions` and `metrics()` to report metrics. Raises UserError if the import path cannot be
    imported, builds no `torch.optim.Optimizer`, or the optimizer cannot shard its state like the parameters.
    """
    config = config if is_builtin("optimizer", config.name) else revealed(config, "optimizer")
    return build_named(named_parameters(parts, scales), config)


def build_named(named: Sequence[NamedParameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over parameters with names; raises like `build_optimizer`."""
    optimizer = component("optimizer", config.name).build(named, config)
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        reason = f"it builds a {kind}, which is not a torch.optim.Optimizer. A run needs its groups, state and hooks"
        remedy = f"write class {kind}(torch.optim.Optimizer), and call super().__init__(params, defaults) in __init__"
        remedy = "return the optimizer" if optimizer is None else remedy
        raise UserError("This run cannot start.", [Violation("optimizer.name", config.name, reason, remedy)])
    remember_groups(optimizer)
    return optimizer


class GroupOptimizer(torch.optim.Optimizer, ABC):
    """Optimizer for plain tensors and DTensors that updates one group of parameters after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, group)
        return loss

    @abstractmethod
    def update(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group; all of them have gradients."""


def adamw_state(state: dict[str, Tensor], like: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """State of a parameter, filled as torch's fused AdamW does; moments have `dtype`, or the parameter's."""
    if not state:
        state["step"] = torch.zeros((), device=local_tensor(like).device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
    return state


@runtime_checkable
class ScalesGradients(Protocol):
    """Optimizer that scales gradients inside its own `step`, as a fused clip-and-update kernel does."""

    def set_grad_scale(self, factor: Tensor) -> None:
        """Scale the gradients of the next step by a scalar on the device."""


@runtime_checkable
class UpdatesComputeWeights(Protocol):
    """Optimizer whose `step` takes gradients in the compute dtype and writes the compute weights. Other optimizers get
    gradients in the dtype of their parameters. It also scales gradients itself."""

    def set_compute_weights(self, copies: Mapping[Any, Tensor]) -> None:
        """Set the compute weight of each parameter that has one, with the parameter's strides."""


def cast_gradients(parameters: Iterable[Tensor]) -> None:
    """Cast gradients to the dtypes of their parameters, one at a time."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


@runtime_checkable
class HasGradientPoint(Protocol):
    """Optimizer whose `step` starts at the gradient's point and ends at the averaged weights."""

    def to_gradient_point(self) -> None:
        """Move the parameters from the averaged weights to the point of the next gradients; the caller refreshes."""
