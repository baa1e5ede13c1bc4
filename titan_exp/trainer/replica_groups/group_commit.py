"""Commit of a step by all replica groups, as `train_step` calls it between the backward pass and the update."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from titan_exp.parallel.qk_clip import QKClip
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.metric_reduction import MetricReducer
from titan_exp.trainer.objective.base import Reduction
from titan_exp.trainer.replica_groups.replica_groups import ReplicaGroups

STOP, SAVE = "stop requested", "checkpoint asked for"


class StepRefused(Exception):
    """The step is repeated: a group died, or a collective between groups failed."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of this rank's part of a step that groups reduce besides gradients."""

    model: Model
    """Has the objective's reductions, and tokens and losses of experts."""
    reducer: MetricReducer
    """Reads metrics of modules."""
    qk_clip: QKClip | None
    """Largest logits, which the update depends on."""

    @property
    def expert_sums(self) -> list[Tensor]:
        """Sums over the step of experts' tokens and losses."""
        return [] if self.model.load is None else self.model.load.step_sums

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """Reductions of metrics by name."""
        return {**self.reducer.module_reductions, **self.model.objective.metrics}


@dataclass
class GroupCommit:
    """`CommitStep` of one step. The flags are this group's before the call, and those of all groups after it."""

    groups: ReplicaGroups
    step: int
    numbers: StepNumbers
    """Reduced in place, unless the step is refused."""
    reseed: Callable[[], object]
    """Seeds the generators for the update, since groups with other shares have drawn other numbers."""
    stop: bool
    """True if a stop was requested."""
    save: bool
    """True if the leader's clock asks for a checkpoint."""

    def __call__(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Reduce gradients, experts' sums, largest logits and metrics over the groups, then vote.

        Raises:
            StepRefused: the step is not committed.
        """
        numbers = self.numbers
        metrics = {**metrics, **numbers.reducer.module_metrics()}
        self.groups.sum_gradients(parameters)
        self.groups.all_reduce(numbers.expert_sums)
        if numbers.qk_clip is not None:
            self.groups.reduce_maxima(numbers.qk_clip.largest)
        flags = {STOP: self.stop, SAVE: self.save and self.groups.leads}
        sums = self.groups.reduce_scalars({**metrics, **flags}, numbers.reductions)
        if not self.groups.commit(self.step):
            raise StepRefused
        self.stop, self.save = bool(sums.pop(STOP)), bool(sums.pop(SAVE))
        self.reseed()
        return sums
