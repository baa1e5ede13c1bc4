"""Lion (Chen et al. 2023): the sign of an interpolated momentum."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_exp.config.groups.optimizer import Betas, OptimizerConfig

if TYPE_CHECKING:
    import torch

    from titan_exp.optim.parameter_groups import NamedParameter


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Fields of Lion, whose learning rate is three to ten times smaller than AdamW's."""

    betas: Betas
    """Share of the momentum in the update's direction, and decay rate of the momentum.
    E.g. `optimizer=lion optimizer.betas='[0.95,0.98]'`."""
    state_precision: Literal["fp32", "bf16"]
    """Precision of the momentum; the update is computed in fp32.
    E.g. `optimizer=lion optimizer.state_precision=bf16`."""

    @property
    def is_scale_invariant(self) -> bool:
        """True: updates are signs, whose rules are Adam's (Yang and Littwin 2023, arXiv 2308.01814)."""
        return True

    @property
    def max_state(self) -> float | None:
        """The momentum."""
        return 1


def build(parameters: Sequence["NamedParameter"], config: Config) -> "torch.optim.Optimizer":
    """Build Lion."""
    from titan_exp.optim.parameter_groups import parameter_groups
    from titan_exp.optim.updates.lion import Lion

    return Lion(parameter_groups(parameters, config), config)
