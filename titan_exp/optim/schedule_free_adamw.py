"""Schedule-free AdamW (Defazio et al. 2024): averaged weights in place of a decaying learning rate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval, Len

from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.types import PositiveFloat

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of schedule-free AdamW, for a learning rate that is constant after its warm-up."""

    betas: Annotated[tuple[Annotated[float, Interval(gt=0, lt=1)], ...], Len(2, 2)]
    """Share of the averaged weights x in the point y that gradients are computed at; and decay rate of the second
    moment. E.g. `optimizer.betas='[0.95,0.99]'`."""
    eps: PositiveFloat
    """Added to the denominator. E.g. `optimizer.eps=1e-15`."""
    averaging_power: Annotated[float, Interval(ge=0)]
    """Power of the learning rate in a step's weight in the average, so that steps of the warm-up count less.
    E.g. `optimizer=schedule_free_adamw optimizer.averaging_power=0`."""

    @property
    def max_state(self) -> float | None:
        """The weights z that steps are added to, and the second moment."""
        return 2

    @property
    def averages_weights(self) -> bool:
        """True: evaluations and checkpoints have the averaged weights x."""
        return True


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build schedule-free AdamW."""
    from titan_exp.optim.parameter_groups import parameter_groups
    from titan_exp.optim.updates.schedule_free_adamw import ScheduleFreeAdamW

    return ScheduleFreeAdamW(parameter_groups(parameters, config), config)
