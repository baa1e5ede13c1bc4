"""Synchronization of semi-synchronous training for the trace: a fragment in flight, its outer step, and a checkpoint.

The trainer's own code runs, for the fragment of which the rank has most. Messages between groups are not traced.
"""

from collections.abc import Sequence

import torch
from torch import nn

from titan_exp.checkpoint.group_states import described, empty_state, own_state
from titan_exp.config.groups.semi_sync import SemiSyncConfig
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.outer.outer_optimizer import OuterOptimizer
from titan_exp.trainer.replica_groups.buckets import AsyncAllReduce, exchange
from titan_exp.trainer.replica_groups.fragment_in_flight import FragmentInFlight


class OuterStep:
    """Largest synchronization of a rank, of the group that writes checkpoints if the run `saves` any."""

    def __init__(
        self,
        outer: OuterOptimizer,
        config: SemiSyncConfig,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        saves: bool,
    ) -> None:
        self._outer, self._config, self._parts, self._optimizer = outer, config, parts, optimizer
        self.delayed, self._saves = config.delay > 0, saves
        self._fragment: FragmentInFlight | None = None

    def send(self) -> None:
        """Copy the pseudo-gradients as for an all-reduce; after a step of the inner optimizer."""
        number = max(range(self._config.fragments), key=self._numbers)
        self._fragment = FragmentInFlight(number, moved=True, sum=AsyncAllReduce())
        assert self._fragment.sum is not None
        self._fragment.sum.start(self._fragment.gradients(self._outer, delayed=self.delayed), lambda _: None)

    def apply(self) -> None:
        """Step the outer optimizer, and release what was in flight."""
        fragment, self._fragment = self._fragment, None
        assert fragment is not None
        assert fragment.sum is not None
        self._outer.step(fragment.sum.sums, fragment.number)

    def collect(self) -> None:
        """Receive the other groups' states for a checkpoint, and release them."""
        if self._saves:
            own = own_state(self._parts, self._optimizer, weights=self._config.keeps_own_weights)
            description = described(self._parts, self._optimizer, own)
            others = [empty_state(self._parts, own, group, description)[0] for group in range(1, self._config.groups)]
            for state in others:
                exchange([local_tensor(value) for value in state.values()], lambda _: None, write_back=True)

    def _numbers(self, fragment: int) -> int:
        return sum(local_tensor(parameter).numel() for parameter in self._outer.parameters(fragment))
