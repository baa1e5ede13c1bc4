"""Group `semi_sync`: replica groups that train alone for some steps, and then average what they have learnt."""

from dataclasses import dataclass
from typing import Literal

from titan_exp.config.groups.types import PositiveFloat, PositiveInt, Share


@dataclass(frozen=True)
class SemiSyncConfig:
    """Semi-synchronous training of `cluster.replica_groups`, which exchange nothing between two synchronizations. It is
    another experiment than synchronous training: part of the run id."""

    mode: Literal["none", "local_sgd", "diloco"] = "none"
    """`local_sgd` averages the weights of the groups (Stich 2019). `diloco` takes the mean movement of their weights
    since the last synchronization for a gradient, and steps an outer SGD with it (Douillard et al. 2023). The state of
    the optimizer stays in its group. It takes 4 bytes per parameter, and 4 more for an outer momentum, sharded like
    the weights."""
    groups: PositiveInt = 2
    """Number of groups, among which every step's batch is divided once and for all; as many as
    `cluster.replica_groups`."""
    interval: PositiveInt = 50
    """Steps between synchronizations; evaluations, checkpoints and the last step are multiples of it."""
    outer_lr: PositiveFloat = 0.7
    """Mode `diloco`: learning rate of the outer SGD."""
    outer_momentum: Share = 0.9
    """Mode `diloco`: decay rate of its momentum; 0 keeps none."""
    outer_nesterov: bool = True
    """Mode `diloco`: Nesterov momentum; without effect if there is none."""

    @property
    def enabled(self) -> bool:
        """True if groups train alone between synchronizations."""
        return self.mode != "none"

    @property
    def outer(self) -> tuple[float, float, bool]:
        """Learning rate, momentum and Nesterov of the outer SGD. A step of 1 without momentum is the average."""
        if self.mode == "local_sgd":
            return 1.0, 0.0, False
        return self.outer_lr, self.outer_momentum, self.outer_nesterov and self.outer_momentum > 0
