"""Stochastic gradient descent with momentum: torch's SGD."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from titan_exp.config.groups.optimizer import OptimizerConfig

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of SGD."""

    momentum: Annotated[float, Interval(ge=0, lt=1)]
    """Decay rate of the momentum; 0 keeps no state. E.g. `optimizer=sgd optimizer.momentum=0.95`."""
    nesterov: bool
    """True if the momentum is Nesterov's, for which `momentum` must be positive.
    E.g. `optimizer=sgd optimizer.nesterov=true`."""

    @property
    def max_state(self) -> float | None:
        """The momentum."""
        return 1


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build torch's SGD, whose weight decay is added to the gradient."""
    import torch

    from titan_exp.optim.parameter_groups import parameter_groups

    groups = parameter_groups(parameters, config)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
