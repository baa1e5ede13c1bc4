"""NAdam (Dozat 2016): Adam with Nesterov momentum, torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import Betas, OptimizerConfig
from titan_exp.config.groups.types import NonNegativeFloat

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of NAdam."""

    betas: Betas
    """Decay rates of the first and second moment. E.g. `optimizer=nadam optimizer.betas='[0.9,0.99]'`."""
    momentum_decay: NonNegativeFloat = 0.004
    """Rate at which the momentum grows with the steps. E.g. `optimizer=nadam optimizer.momentum_decay=0.001`."""

    @property
    def max_state(self) -> float | None:
        """Two moments."""
        return 2


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build torch's NAdam with decoupled weight decay."""
    import torch

    from titan_exp.optim.parameter_groups import parameter_groups

    options = {"betas": config.betas, "momentum_decay": config.momentum_decay, "decoupled_weight_decay": True}
    return torch.optim.NAdam(parameter_groups(parameters, config), lr=config.lr, **options)
