"""Trainer: builds the train state of this rank, restores the newest checkpoint, and runs the training loop."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from titan_exp.checkpoint.background_upload import RemoteRun
from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.optim.lr_schedule import LRSchedule
from titan_exp.tracking.logging import PROGRESS
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.commit import Commit, Flags
from titan_exp.trainer.distributed import seed_step, set_deterministic
from titan_exp.trainer.metrics import Report
from titan_exp.trainer.part import Parts, Phase, Run, Step
from titan_exp.trainer.parts import all_parts
from titan_exp.trainer.profiling.memory_snapshot import record_live_allocations
from titan_exp.trainer.restore import ENDED, PARTS, restore_state
from titan_exp.trainer.train_state import assemble, build_train_loader
from titan_exp.trainer.train_step import StepRefused, train_step

STOP_SECONDS = 0.1  # shortest time between two looks for a stop request, which is a file and may lie on a slow disk


class Trainer:
    """One rank of a training run. All ranks construct it, then call `restore` and `run` together. A `Commit`, built
    from the trainer, makes worlds agree on a step. Raises UserError if the data or an import path cannot be loaded."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        device: torch.device,
        commit: "Callable[[Trainer], Commit]" = Commit,
    ) -> None:
        self.experiment, self.folder, self.layout = experiment, folder, ResolvedLayout.of(experiment)
        set_deterministic(experiment.training.deterministic)
        record_live_allocations(experiment.profiling, device)
        self.state = state = assemble(experiment, self.layout, device)
        self.mesh, self.model, self.optimizer = state.mesh, state.model, state.optimizer
        self.parts = Parts(all_parts(experiment, folder, state, self.layout), ranks=self.mesh.cpu_group)
        peak, steps = experiment.optimizer.lr, experiment.training.steps
        self.schedule = LRSchedule(experiment.lr_schedule, peak=peak, steps=steps)
        self.loader = build_train_loader(experiment, self.layout, state)
        self.step = self.tokens = 0
        self._looks_at = 0.0
        self.ended: str | None = None
        """Reason why a part has ended training."""
        self.commit = commit(self)
        config = experiment.checkpoint
        remote = RemoteRun.of(config.remote, experiment.experiment.name, folder.path.name)
        self.checkpointer = Checkpointer(config, folder.checkpoints, remote=remote, prepare=self.commit.restores)

    def restore(self) -> None:
        """Load the newest checkpoint of the run and open the report. Without one, a run begins with
        `checkpoint.continue_from`, `checkpoint.initial`, or new weights. Raises UserError if that cannot be."""
        with ExitStack() as stack:
            stack.callback(self.parts.close)
            restore_state(self, self.commit)
            self.state.refresh()
            leads = self.commit.leads
            self.report = Report(self.experiment, self.folder, self.state, first_step=self.step, writes=leads)
            stack.callback(self.report.close, "failed")
            self.commit.restored()
            self.parts.begin(Run(self.experiment, self.folder, self.state, self.report, self.step))
            stack.pop_all()  # `run` closes the parts, its caller the report

    def run(self) -> bool:
        """Train to the last step. Returns False if a stop was requested; the state is saved either way. Raises Diverged
        if the loss is not finite, UserError if the last state could not be saved or exported."""
        stop = False
        PROGRESS.begin(self.step)
        with closing(self.loader), closing(self.parts), closing(self.checkpointer):
            while not self.is_over and not stop:
                stop = self._one_step()
            if not self.commit.finishes():
                return self.is_over
            self._save()
            with PROGRESS.phase("the last checkpoint"):
                self.checkpointer.wait()
                failed = self.parts.finish(self._finished(), self.report.pause)
                self.checkpointer.finish_uploads(stopped=not self.is_over)
        if self.experiment.checkpoint.mode != "off" and self.checkpointer.durable != self.step:
            raise UserError(
                f"We could not save the state after step {self.step} (the log says why). Free disk space and start the "
                "run again: it continues from its newest complete checkpoint."
            )
        if failed is not None:
            raise failed
        self.commit.leave()
        return self.is_over

    def _one_step(self) -> bool:
        """Train one step and do what follows it, once all worlds agree. Returns True if training stops."""
        flags = self.commit.meet()
        if flags is None and not self.is_over:
            flags = self._train()
        return flags is not None and self._log_and_save(flags)

    def _train(self) -> Flags | None:
        """Train one step. Returns None if the step is repeated, or if the worlds train on without agreeing on it."""
        step, times, position = self.step + 1, self.report.times, self.loader.state_dict()
        self.report.begin_step()
        self.parts.before(step)
        self.seed()
        with times.loading():
            batches = [next(self.loader) for _ in range(self.layout.gradient_accumulation_at(step))]
        batches = self.parts.on_batches(step, batches)
        flags = Flags(self._stop_requested(), self.checkpointer.interval_elapsed())
        batches, tokens = self.commit.divide(step, batches, flags)
        try:
            with times.computing():
                lr = self.schedule(step)
                result = train_step(
                    self.state, self.parts, batches, step=step, tokens=tokens, lr=lr, commit=self.commit
                )
        except StepRefused:
            self.optimizer.zero_grad()
            self.parts.refused(step)
            self.loader.seek(position)
            return None
        self.step, self.tokens = step, self.tokens + result.tokens
        self.report.end_step(step, result.tokens * self.commit.worlds)
        PROGRESS.step(step)
        agreed = self.commit.settle(result, logs=self._logs)
        if agreed is None:
            self.parts.after(Phase.OBSERVE, replace(self._finished(), agreed=False), self.report.pause)
            self.checkpointer.poll()
        return agreed

    def _log_and_save(self, flags: Flags) -> bool:
        """Evaluate, log and save, in this order: no checkpoint without the rows before it. True if training stops."""
        done = self._finished()
        self.parts.after(Phase.OBSERVE, done, self.report.pause)
        flags |= Flags(save=self.checkpointer.due(self.step))
        done.numbers = dict(self.parts.numbers)
        done.rows = self.commit.rows(self._numbers, due=self._logs or flags.stop or flags.save)
        self.parts.after(Phase.DECIDE, done, self.report.pause)
        self.ended = self.ended or done.stop_reason
        flags |= Flags(save=done.wants_checkpoint)
        if done.rows:
            self.report.write(done.rows, self.parts.take_numbers())
        self.parts.after(Phase.SAVE, done, self.report.pause)
        self.checkpointer.poll()
        if flags.save or flags.stop or self.is_over:
            self._save(gathers=True)
        self.report.warn(self.checkpointer.warning())
        self.parts.after(Phase.REPORT, replace(done, last=self.is_over), self.report.pause)
        self.commit.resume(flags)
        return flags.stop

    def _save(self, *, gathers: bool = False) -> None:
        if gathers and self.experiment.checkpoint.mode != "off" and not self._saves_weights_only:
            self.commit.collect()
        if not self.commit.leads:
            return
        worlds, only = self.commit.states, self._saves_weights_only
        with self.report.pause("checkpoint"):
            data, progress = self.loader.state_dict(), self.progress()
            self.checkpointer.save(
                self.step, self.model.parts, self.optimizer, data, progress, weights_only=only, other_worlds=worlds
            )

    def progress(self) -> dict[str, Any]:
        """State other than tensors and data, for checkpoints and for worlds that take it over."""
        progress = {"step": self.step, "tokens": self.tokens, ENDED: self.ended, "config": to_dict(self.experiment)}
        return {**progress, PARTS: self.parts.state(), **self.commit.progress()}

    def _stop_requested(self) -> bool:
        now = time.monotonic()
        if now < self._looks_at:
            return False
        self._looks_at = now + STOP_SECONDS
        return self.folder.stop_requested()

    def seed(self) -> None:
        """Seed the generators for the next step."""
        seed_step(self.experiment.experiment.seed, self.step + 1, self.mesh)

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return self.schedule(self.step)

    @property
    def is_over(self) -> bool:
        """True after the last step."""
        return self.ended is not None or self.step >= self.experiment.training.last_step

    @property
    def _logs(self) -> bool:
        """True if a row is due for this step."""
        last, every = self.is_over, self.experiment.tracking.log_every
        return last or self.step % every == 0 or self.parts.due(self.step, last=last)

    @property
    def _saves_weights_only(self) -> bool:
        return self.is_over and self.experiment.checkpoint.last == "weights"

    def _finished(self) -> Step:
        return Step(self.step, self.is_over, self.tokens)

    def _numbers(self) -> dict[str, float | int | None]:
        """Numbers of a row that need no communication."""
        return {**self.parts.take_numbers(), **self.loader.epoch_metrics(), **self.checkpointer.pop_timings()}
