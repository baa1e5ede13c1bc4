"""Fragment in flight: pseudo-gradients that are summed over the groups, up to the outer step. The planner traces it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_exp.optim.outer.outer_optimizer import OuterOptimizer
from titan_exp.trainer.replica_groups.buckets import AsyncAllReduce


@dataclass
class FragmentInFlight:
    """Fragment whose pseudo-gradient is being summed over the groups."""

    number: int
    moved: bool
    """False in a group that had just healed: it has nothing to average."""
    own: list[Tensor] | None = None
    """Pseudo-gradient of this group, if its weights will not tell later."""
    sum: AsyncAllReduce | None = None
    """Running sum over the groups; None once that was refused."""

    def gradients(self, outer: OuterOptimizer, *, delayed: bool) -> Iterable[Tensor]:
        """Pseudo-gradient to send, kept for a repetition if the group trains on until a `delayed` outer step."""
        if self.own is not None:
            return self.own
        gradients = outer.pseudo_gradients(self.number)
        if not self.moved:
            return map(torch.zeros_like, gradients)
        if delayed:
            self.own = list(gradients)
        return gradients if self.own is None else self.own
