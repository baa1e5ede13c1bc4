"""Trainer of semi-synchronous training: one rank of a replica group that synchronizes every few steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from titan_exp.checkpoint.group_states import WRITER, load_own_state
from titan_exp.checkpoint.state_dict import persistent_buffers
from titan_exp.config.groups.experiment import Experiment
from titan_exp.data.batch import MicroBatch
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.experts.load_metrics import counts_of, load_numbers
from titan_exp.trainer.objective.base import token_counts
from titan_exp.trainer.replica_groups.semi_sync import SemiSync
from titan_exp.trainer.train_step import StepResult, require_finite
from titan_exp.trainer.trainer import Trainer


class SemiSyncTrainer(Trainer):
    """One rank of a semi-synchronous run; raises like `Trainer`."""

    _commits_steps = False
    _batch_tokens = 0
    """Predicted tokens of the step's whole batch, of which this rank has read its part."""

    def __init__(self, experiment: Experiment, folder: RunFolder, device: torch.device) -> None:
        super().__init__(experiment, folder, device)
        assert self.groups is not None, "checked by the rules"
        assert self.outer is not None
        self._semi_sync = SemiSync(
            experiment.semi_sync,
            self.groups,
            self.outer,
            self.mesh,
            self.reducer.reductions,
            buffers=persistent_buffers(self.model.parts),
        )

    def restore(self) -> None:
        """Load the state with which training begins, as in `Trainer`, and this group's own optimizer state."""
        super().restore()
        self._semi_sync.begin(self.step, self.tokens)
        if self.step:
            self._load_own_state(self.step)

    def _one_step(self) -> bool:
        """Train one step as in `Trainer`; before the first, meet the other groups."""
        if self.groups is not None and self.groups.quorum is None:
            stop = self._synchronize()
            if stop or self._is_over:
                return stop
        return super()._one_step()

    def _begin_step(self) -> bool:
        return True

    def _own(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        self._batch_tokens = sum(token_counts(self.model.objective, batch)[0] for batch in batches)
        return self._semi_sync.share(batches)

    def _after_step(self, result: StepResult, *, stop: bool, save: bool) -> bool:
        """Keep the row of a step until the groups synchronize, and synchronize them if due."""
        semi_sync, step = self._semi_sync, self.step
        semi_sync.add_step(self._batch_tokens, stop=stop, save=save)
        if self._evaluates or self._is_over or step % self.experiment.tracking.log_every == 0:
            values, row = self.report.row(step, self.tokens, result, lr=self.schedule(step))
            values |= {} if row is None else load_numbers(self.report.expert_counts())
            semi_sync.add_row(values, row, result.tokens)
        if semi_sync.due(step):
            return self._synchronize()
        self.checkpointer.poll()
        return False

    def _synchronize(self) -> bool:
        """Join the groups until they are synchronized after this step, or have met to begin; then evaluate, log and
        save if due. Returns True if a stop was requested."""
        groups, semi_sync = self.groups, self._semi_sync
        assert groups is not None
        while True:
            if not semi_sync.in_flight:
                self._join_groups(groups)
                if semi_sync.synchronized == self.step:
                    if self._is_over or semi_sync.complete():
                        return False
                    continue
                semi_sync.send(self.step)
            if not semi_sync.applies(self.step):
                return False
            agreement = semi_sync.apply(self.step)
            if agreement is not None:
                break
        self.tokens = semi_sync.tokens
        self._use_agreed_weights(True)
        numbers = self._evaluate() | self.loader.epoch_metrics() | self.checkpointer.pop_timings()
        rows = semi_sync.finished_rows(self.report.attempt, numbers)
        for row in rows:
            if row.row is not None:
                row.row |= self.report.expert_row(row.row["step"], row.values, counts_of(row.values))
        self.report.write([row.row for row in rows if row.row is not None])
        for row in rows if self.experiment.training.stop_on_nonfinite else ():
            require_finite(self.step, row.values["loss"], row.values["grad_norm"])
        config = self.experiment.checkpoint
        save = agreement.save or agreement.stop or self._is_over
        if save and config.mode != "off" and not (self._is_over and config.last == "weights"):
            semi_sync.collect_states(self.model.parts, self.optimizer)
        self._finish_step(save=save)
        if not self._is_over:
            semi_sync.states = {}  # the save has copies
        if not (self._is_over or agreement.stop):
            self._use_agreed_weights(False)
        return agreement.stop

    def _use_agreed_weights(self, agreed: bool) -> None:
        """Evaluate, save and export the outer optimizer's weights, if this group trains others."""
        outer = self._semi_sync.outer
        if self.experiment.semi_sync.keeps_own_weights and outer.swapped != agreed:
            outer.swap()

    @property
    def _shares(self) -> int:  # type: ignore[override]
        return 1 if self.groups is None else self.groups.size

    @property
    def _position(self) -> int:  # type: ignore[override]
        return self._semi_sync.position(self.step)

    @property
    def _group_states(self) -> Mapping[str, torch.Tensor]:  # type: ignore[override]
        return self._semi_sync.states

    def _progress(self) -> dict[str, Any]:
        assert self.groups is not None
        return {**super()._progress(), WRITER: self.groups.group.number, "semi_sync": self._semi_sync.progress()}

    def _after_healing(self, progress: Mapping[str, Any]) -> None:
        """Take over the round of another group; before the first, load this group's own state from the checkpoint."""
        self._semi_sync.heal(self.step, progress["semi_sync"])
        if self._semi_sync.synchronized == self.step and not self._is_over:
            self._use_agreed_weights(False)
            self._semi_sync.outer.back_to_kept()
            self._load_own_state(self.step)

    def _load_own_state(self, step: int) -> None:
        """Load this group's own state from the checkpoint after a step, if there is one; else it has another's."""
        groups, path = self.groups, self.checkpointer.folder.path_of(step)
        assert groups is not None
        number, saved = groups.group.number, self.checkpointer.from_leader(path.exists())
        weights = self.experiment.semi_sync.keeps_own_weights
        if not saved or not load_own_state(path, number, self.model.parts, self.optimizer, weights=weights):
            get_logger().warning("group %d begins after step %d with the optimizer state of another", number, step)
        self._semi_sync.outer.after_move()


def build_trainer(experiment: Experiment, folder: RunFolder, device: torch.device) -> Trainer:
    """Build the trainer of a run; raises like `Trainer`."""
    kind = SemiSyncTrainer if experiment.semi_sync.enabled else Trainer
    return kind(experiment, folder, device)
