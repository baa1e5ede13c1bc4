"""Commit of a step by all replica groups, as `train_step` calls it between the backward pass and the update."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from titan_exp.trainer.objective.base import Reduction
from titan_exp.trainer.replica_groups.replica_groups import ReplicaGroups

STOP, SAVE = "stop requested", "checkpoint asked for"


class StepRefused(Exception):
    """The step is repeated: a group died, or a collective between groups failed."""


@dataclass
class GroupCommit:
    """`CommitStep` of one step. The flags are this group's before the call, and those of all groups after it."""

    groups: ReplicaGroups
    step: int
    reductions: Mapping[str, Reduction]
    """Reductions of the objective's metrics."""
    expert_sums: Sequence[Tensor]
    """Sums over the step of experts' tokens and losses; those of all groups afterwards, unless the step is refused."""
    reseed: Callable[[], object]
    """Seeds the generators for the update, since groups with other shares have drawn other numbers."""
    stop: bool
    """True if a stop was requested."""
    save: bool
    """True if the leader's clock asks for a checkpoint."""

    def __call__(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Sum gradients, experts' sums and metrics over the groups, then vote.

        Raises:
            StepRefused: the step is not committed.
        """
        self.groups.sum_gradients(parameters)
        self.groups.all_reduce(self.expert_sums)
        flags = {STOP: self.stop, SAVE: self.save and self.groups.leads}
        sums = self.groups.reduce_scalars({**metrics, **flags}, self.reductions)
        if not self.groups.commit(self.step):
            raise StepRefused
        self.stop, self.save = bool(sums.pop(STOP)), bool(sums.pop(SAVE))
        self.reseed()
        return sums
