"""Commits of replica groups: groups take every step together, or train alone between synchronizations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.checkpoint.load_state import persistent_buffers, sync_tied_state
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import MicroBatch
from titan_exp.extensions.replica_groups.config import cluster_of, semi_sync_of
from titan_exp.extensions.replica_groups.events import record_event
from titan_exp.extensions.replica_groups.groups import (
    WRITER,
    build_replica_groups,
    described,
    healing_state,
    known_step,
    load_own_state,
)
from titan_exp.extensions.replica_groups.outer_optimizer import OuterOptimizer, OuterSteps
from titan_exp.extensions.replica_groups.semi_sync import SemiSync
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.fsdp import free_gathered
from titan_exp.tracking.logging import get_logger
from titan_exp.trainer.commit import Commit, Flags
from titan_exp.trainer.experts import counts_of, load_numbers
from titan_exp.trainer.metrics import Numbers, Row, StepResult
from titan_exp.trainer.objective import Reduction, token_counts
from titan_exp.trainer.restore import adopt_progress
from titan_exp.trainer.train_step import StepRefused
from titan_exp.trainer.trainer import Trainer
from titan_exp.trainer.updates import Routing

STOP, SAVE = "stop requested", "checkpoint asked for"


class GroupCommit(Commit):
    """Groups that divide the micro-batches of every step, sum their gradients, and commit or repeat the step."""

    sums = True

    def __init__(self, trainer: Trainer, *, by_number: bool = False) -> None:
        super().__init__(trainer)
        cluster = cluster_of(trainer.experiment)
        self._groups = build_replica_groups(cluster, trainer.mesh, trainer.folder, by_number=by_number)

    @property
    def leads(self) -> bool:  # type: ignore[override]
        """True in the oldest living group."""
        return self._groups.leads

    @property
    def restores(self) -> bool:  # type: ignore[override]
        """True in one group before the attempt's first step."""
        return self._groups.restores

    def takes_over(self) -> bool:
        """True if another group has a step."""
        trainer = self._trainer
        return not self.restores and bool(trainer.checkpointer.from_leader(known_step(trainer.folder)))

    def meet(self) -> Flags | None:
        self._join()

    def divide(
        self, step: int, batches: Sequence[MicroBatch], flags: Flags
    ) -> tuple[Sequence[MicroBatch], tuple[int, ...]]:
        """Divide the micro-batches. The tokens are those of all groups, because the loss is a mean over them."""
        batches, tokens = super().divide(step, batches, flags)
        self._step = step
        return self._groups.share(batches, self._trainer.layout.indivisible_microbatches), tokens

    def reduce(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Reduce gradients, numbers of parts and metrics over the groups, then vote on the step."""
        trainer, groups = self._trainer, self._groups
        reducer, parts = trainer.report.reducer, trainer.parts
        metrics = {**metrics, **reducer.module_metrics()}
        groups.sum_gradients(parameters)
        groups.all_reduce([tensor for part in parts for tensor in part.sums])
        groups.reduce_maxima([tensor for part in parts for tensor in part.maxima])
        flags = {STOP: self._flags.stop, SAVE: self._flags.save and groups.leads}
        reductions: Mapping[str, Reduction] = {**reducer.module_reductions, **trainer.model.objective.metrics}
        sums = groups.reduce_scalars({**metrics, **flags}, reductions)
        if not groups.commit(self._step):
            raise StepRefused
        self._flags = Flags(bool(sums.pop(STOP)), bool(sums.pop(SAVE)))
        trainer.seed()  # groups with other shares have drawn other numbers
        return sums

    def rows(self, numbers: Callable[[], Numbers], *, due: bool) -> list[Row]:
        rows = super().rows(numbers, due=due)
        for row in rows:
            if row.row is not None:
                row.row |= self._groups.row()
        return rows

    def finishes(self) -> bool:
        """True in the leader. The other groups wait for it, and one of them takes over if it dies."""
        groups = self._groups
        while not groups.leads:
            leader = groups.leader
            self._join()  # the leader joins once it has finished, or it is dead
            if groups.leader == leader:
                return False
        return True

    def leave(self) -> None:
        self._join()

    def _join(self) -> None:
        trainer, groups = self._trainer, self._groups
        quorum = groups.join(trainer.step, self._position)
        while (quorum.behind or quorum.source is not None) and not self._heal(behind=quorum.source is not None):
            quorum = groups.join(trainer.step, self._position)
        report, step = trainer.report, trainer.step
        if groups.leads and groups.changed and report.leader:
            quorum_of = {"quorum": groups.quorum_id, "groups": groups.numbers, "joined": groups.joined}
            record_event(trainer.folder, report.attempt, event="quorum", step=step, **quorum_of)
        devices = dist.get_world_size() * groups.size
        report.take_over(step, devices=devices, writes=groups.leads, changed=groups.changed)

    @property
    def _position(self) -> int | None:
        """Progress for quorums, if it is not the step."""
        return None

    def _heal(self, *, behind: bool) -> bool:
        """Send the state to groups that are behind, or take over another's; returns False if that did not arrive."""
        trainer, groups = self._trainer, self._groups
        parts, optimizer = trainer.model.parts, trainer.optimizer
        free_gathered(parts)

        def tensors(description: Any = None) -> list[Tensor]:
            return [local_tensor(x) for x in healing_state(parts, optimizer, description).values()]

        if not behind:
            state = described(parts, optimizer, healing_state(parts, optimizer))
            also = {"data": trainer.loader.state_dict(), "rows": trainer.report.last_rows, "state": state}
            groups.send_state({**trainer.progress(), **also}, tensors())
            return True
        progress = groups.receive_state(lambda progress: tensors(progress["state"]))
        if progress is None:
            return False
        sync_tied_state(parts, optimizer)
        adopt_progress(trainer, progress)
        trainer.loader.seek(progress["data"])
        trainer.report.last_rows = progress["rows"]
        self._after_healing(progress)
        trainer.state.refresh()
        get_logger().info("healed, and continues after step %d", trainer.step)
        return True

    def _after_healing(self, progress: Mapping[str, Any]) -> None:
        """Take over the rest of another group's progress."""


class SemiSyncCommit(GroupCommit):
    """Groups train alone, each on its block of every step's sequences, and synchronize every few steps."""

    sums = False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer, by_number=True)
        self._config = semi_sync_of(trainer.experiment)
        self._outer: OuterOptimizer = next(part.outer for part in trainer.parts if isinstance(part, OuterSteps))
        for part in trainer.parts:
            if isinstance(part, Routing):
                part.shares = self._config.groups
        self._batch_tokens = 0
        """Predicted tokens of the step's whole batch, in the part that this rank has read."""

    @property
    def worlds(self) -> int:  # type: ignore[override]
        """Number of living groups; each counts its own tokens."""
        return self._groups.size

    @property
    def states(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """States of the groups, from the last `collect`."""
        return self._semi_sync.states

    def restored(self) -> None:
        """Begin a round with the state of a checkpoint and this group's own optimizer state."""
        trainer, buffers = self._trainer, persistent_buffers(self._trainer.model.parts)
        reductions = trainer.report.reducer.reductions
        self._semi_sync = SemiSync(self._config, self._groups, self._outer, trainer.mesh, reductions, buffers=buffers)
        self._semi_sync.begin(trainer.step, trainer.tokens)
        if trainer.step:
            self._load_own_state()

    def meet(self) -> Flags | None:
        """Meet the other groups before the first step."""
        return self._synchronize() if self._groups.quorum is None else None

    def divide(
        self, step: int, batches: Sequence[MicroBatch], flags: Flags
    ) -> tuple[Sequence[MicroBatch], tuple[int, ...]]:
        """Take this group's share. The tokens are this share's, because the loss is a mean over them."""
        self._batch_tokens = sum(token_counts(self._trainer.model.objective, batch)[0] for batch in batches)
        return Commit.divide(self, step, self._semi_sync.share(batches), flags)

    def reduce(self, parameters: Iterable[nn.Parameter], metrics: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Send nothing."""
        return metrics

    def settle(self, result: StepResult, *, logs: bool) -> Flags | None:
        """Keep the row of a step until the groups synchronize; synchronize them if it is due."""
        trainer, semi_sync = self._trainer, self._semi_sync
        save = self._flags.save or trainer.checkpointer.due(trainer.step)
        semi_sync.add_step(self._batch_tokens, stop=self._flags.stop, save=save)
        if logs:
            share = trainer.report.share(trainer.step, trainer.tokens, result, lr=trainer.lr)
            values = share.values | ({} if share.row is None else load_numbers(trainer.report.experts.counts()))
            semi_sync.add_row(values, share.row, result.tokens)
        return self._synchronize() if semi_sync.due(trainer.step) else None

    def rows(self, numbers: Callable[[], Numbers], *, due: bool) -> list[Row]:
        """Rows of the steps since the last synchronization."""
        report = self._trainer.report
        rows: list[Row] = [*self._semi_sync.finished_rows(report.attempt, numbers())]
        for row in rows:
            if row.row is not None:
                row.row |= report.expert_row(row.row["step"], row.values, counts_of(row.values))
        return rows

    def collect(self) -> None:
        """Gather the inner optimizers' states in the group that saves."""
        self._semi_sync.collect_states(self._trainer.model.parts, self._trainer.optimizer)

    def resume(self, flags: Flags) -> None:
        if self._trainer.is_over:
            return
        self._semi_sync.states = {}  # the save has copies of them
        if not flags.stop:
            self._use_agreed_weights(False)

    def progress(self) -> dict[str, Any]:
        return {WRITER: self._groups.group.number, "semi_sync": self._semi_sync.progress()}

    def _synchronize(self) -> Flags | None:
        """Join the groups until they are synchronized after this step; returns None if they only met to begin."""
        trainer, semi_sync = self._trainer, self._semi_sync
        while True:
            if not semi_sync.in_flight:
                self._join()
                if semi_sync.synchronized == trainer.step:
                    if trainer.is_over or semi_sync.complete():
                        return None
                    continue
                semi_sync.send(trainer.step)
            if not semi_sync.applies(trainer.step):
                return None
            flags = semi_sync.apply(trainer.step)
            if flags is not None:
                break
        trainer.tokens = semi_sync.tokens
        self._use_agreed_weights(True)
        return flags

    def _use_agreed_weights(self, agreed: bool) -> None:
        """Put the outer optimizer's weights in place for evaluation, save and export, if this group trains others."""
        if self._config.keeps_own_weights and self._outer.swapped != agreed:
            self._outer.swap()

    @property
    def _position(self) -> int:
        return self._semi_sync.position(self._trainer.step)

    def _after_healing(self, progress: Mapping[str, Any]) -> None:
        """Take over another group's round; before the first round, load this group's own state from the checkpoint."""
        trainer = self._trainer
        self._semi_sync.heal(trainer.step, progress["semi_sync"])
        if self._semi_sync.synchronized == trainer.step and not trainer.is_over:
            self._use_agreed_weights(False)
            self._outer.back_to_kept()
            self._load_own_state()

    def _load_own_state(self) -> None:
        """Load this group's own state from the step's checkpoint. Without one, it keeps another group's state."""
        trainer, number = self._trainer, self._groups.group.number
        path = trainer.checkpointer.folder.path_of(trainer.step)
        saved = trainer.checkpointer.from_leader(path.exists())
        weights, parts = self._config.keeps_own_weights, trainer.model.parts
        if not saved or not load_own_state(path, number, parts, trainer.optimizer, weights=weights):
            text = "group %d begins after step %d with another group's optimizer state"
            get_logger().warning(text, number, trainer.step)
        self._outer.after_move()


def commit_of(experiment: Experiment) -> type[Commit]:
    """Commit class of a run with replica groups."""
    return SemiSyncCommit if semi_sync_of(experiment).enabled else GroupCommit
