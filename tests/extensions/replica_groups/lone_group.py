"""Stub of `ReplicaGroups` for a group that is alone: its sums are its own numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from titan_exp.extensions.replica_groups.events import ReplicaGroup
from titan_exp.extensions.replica_groups.outer_optimizer import AsyncAllReduce, exchange


class LoneGroup:
    """The one living group, as `SemiSync` sees it."""

    group, size, leads = ReplicaGroup(1, 2, ""), 1, True
    connected = True
    """False if groups of the quorum cannot be connected."""

    def __init__(self, numbers: list[int] | None = None) -> None:
        self.numbers = numbers or [1]

    def start_all_reduce(self, tensors: Iterable[torch.Tensor]) -> AsyncAllReduce:
        started = AsyncAllReduce()
        if self.connected:
            started.start(tensors, lambda _: None)
        return started

    def finish_all_reduce(self, _: AsyncAllReduce) -> float:
        return 0.0

    def all_reduce(self, _: list[torch.Tensor]) -> float:
        return 0.0

    description: Any = None
    """Description of the state of a group that is only counted."""

    def receive_tensors(self, _: int, prepare: Callable[[Any], list[torch.Tensor]]) -> bool:
        """The states of groups that are only counted stay empty."""
        exchange(prepare(self.description), lambda _: None, write_back=True)
        return True

    def commit(self, *_: object) -> bool:
        return self.connected
