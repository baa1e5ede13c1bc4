"""Build the optimizer that `optimizer.name` names."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.schema.component import component, is_builtin
from titan_exp.config.secrets.variables import revealed
from titan_exp.models.parametrization.parameter_scale import ParameterScale
from titan_exp.optim.parameter_groups import NamedParameter, named_parameters, remember_groups


def build_optimizer(
    parts: Iterable[nn.Module], config: OptimizerConfig, scales: Mapping[str, ParameterScale] = {}
) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of this rank's modules, with the scales of a parametrization by name.

    An optimizer is one file in `titan_exp/optim/`, or a module of your own: `Config`, a dataclass that extends
    `OptimizerConfig`, and `build(parameters, config)`, which gets the parameters with their names and roles. It imports
    torch inside `build`, because composing a configuration imports the file. An optimizer may also define
    `set_grad_scale` to clip in its `step`, and `metric_reductions` and `metrics()` to report metrics.

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
