"""Adamax (Kingma and Ba 2015): Adam with the largest recent gradient in place of the second moment, torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_exp.config.groups.optimizer import Betas, OptimizerConfig
from titan_exp.config.groups.types import PositiveFloat

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of Adamax."""

    betas: Betas
    """Decay rates of the momentum and of the largest gradient. E.g. `optimizer=adamax optimizer.betas='[0.9,0.99]'`."""
    eps: PositiveFloat = 1e-8
    """Epsilon, which is added to the denominator. E.g. `optimizer.eps=1e-15`."""


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build torch's Adamax, whose weight decay is added to the gradient."""
    import torch

    from titan_exp.optim.parameter_groups import parameter_groups

    first, second = config.betas
    groups = parameter_groups(parameters, config)
    return torch.optim.Adamax(groups, lr=config.lr, betas=(first, second), eps=config.eps)
