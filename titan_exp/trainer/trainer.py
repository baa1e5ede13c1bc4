"""Trainer: builds the train state of this rank, restores the newest checkpoint, and runs the training loop."""

import contextlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.formats.hf_sharded_load import load_hf_sharded
from titan_exp.checkpoint.formats.sharded_hf_export import ShardedHFExporter
from titan_exp.checkpoint.group_states import described, healing_state
from titan_exp.checkpoint.remote.checkpoint_cache import local_copy
from titan_exp.checkpoint.remote.remote_run import RemoteRun
from titan_exp.checkpoint.state_dict import WEIGHTS_ONLY_KEY, sync_tied_state
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.paths.checkpoint_paths import huggingface_folder
from titan_exp.config.schema.config_diff import differences
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.data.batch import MicroBatch
from titan_exp.data.train_loader import TrainLoader
from titan_exp.data.validation_loader import ValidationLoader
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.optim.lr_schedule import LRSchedule
from titan_exp.optim.weight_average import AVERAGE
from titan_exp.parallel.fsdp.apply import free_gathered
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.progress_tracker import PROGRESS
from titan_exp.tracking.run_folder.lineage import Lineage
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.trainer.determinism import seed_step, set_deterministic
from titan_exp.trainer.experts.load_metrics import ExpertMetrics
from titan_exp.trainer.forward_backward import Model
from titan_exp.trainer.gc import GarbageCollection
from titan_exp.trainer.log_head import log_lineage
from titan_exp.trainer.metric_reduction import MetricReducer
from titan_exp.trainer.metrics import Report
from titan_exp.trainer.parent_state import load_parent_state, require_same_function
from titan_exp.trainer.profiling.compile_cache import cache_of
from titan_exp.trainer.profiling.memory_snapshot import MemorySnapshot
from titan_exp.trainer.profiling.profiler import ProfileWindow
from titan_exp.trainer.profiling.roofline_note import note_roofline
from titan_exp.trainer.replica_groups.group_commit import GroupCommit, StepNumbers, StepRefused
from titan_exp.trainer.replica_groups.replica_groups import ReplicaGroups, build_replica_groups, known_step
from titan_exp.trainer.sampling.training_images import TrainingImages
from titan_exp.trainer.train_state import assemble
from titan_exp.trainer.train_step import StepResult, require_finite, sync_step_flags, train_step
from titan_exp.trainer.validate import averaged_row, evaluate_split


class Trainer:
    """One rank of a training run. All ranks construct it, then call `restore` and `run` together.

    Raises:
        UserError: the data or an import path cannot be loaded.
    """

    _commits_steps = True
    """False if replica groups train alone between synchronizations (`SemiSyncTrainer`)."""
    _shares = 1
    """Groups that train alone, with as many tokens as this one."""
    _position: int | None = None
    """Progress in quorums, if it is not the step."""
    _group_states: Mapping[str, Tensor] = {}
    """Inner optimizer states of other groups, for the next checkpoint."""

    def __init__(self, experiment: Experiment, folder: RunFolder, device: torch.device) -> None:
        training, layout = experiment.training, ResolvedLayout.of(experiment)
        self.experiment, self.layout, self.folder = experiment, layout, folder
        set_deterministic(training.deterministic)
        self.memory = MemorySnapshot(experiment.profiling.memory_step, folder.traces, device)
        state = assemble(experiment, layout, device)
        self.mesh, self.built, self.optimizer = state.mesh, state.built, state.optimizer
        self.model: Model = state.model
        self.groups = build_replica_groups(experiment.cluster, self.mesh, folder, by_number=not self._commits_steps)
        self.quantize_weights = state.quantize_weights
        self.clipper, self.average, self.outer = state.clipper, state.average, state.outer
        self.schedule = LRSchedule(experiment.lr_schedule, peak=experiment.optimizer.lr, steps=training.steps)
        shard: dict[str, Any] = {
            "dp_rank": self.mesh.dp_rank,
            "dp_degree": self.mesh.dp_degree,
            "micro_batch_size": layout.micro_batch_size,
        }
        seed, pin_memory = experiment.experiment.seed, device.type == "cuda"
        prepare = getattr(self.model.objective, "prepare", None)
        self.loader = TrainLoader(
            experiment.data,
            training,
            seed,
            **shard,
            pin_memory=pin_memory,
            mtp_depth=mtp_depth(experiment.model),
            prepare=None if prepare is None else partial(prepare, seed=seed),
        )
        self.validation = (
            ValidationLoader(experiment.data, training.seq_len, **shard) if training.evaluate_every else None
        )
        self.images = TrainingImages(experiment, self.model) if experiment.tracking.images_every else None
        remote = experiment.checkpoint.remote
        self.checkpointer = Checkpointer(
            experiment.checkpoint,
            folder.checkpoints,
            remote=None if remote is None else RemoteRun(remote, experiment.experiment.name, folder.path.name),
            prepare=self.groups is None or self.groups.restores,
        )
        self.exports = ShardedHFExporter(
            experiment.checkpoint, experiment.model, experiment.data, folder.export, self.mesh
        )
        self.step = self.tokens = 0
        self.flops_per_token = state.built.flops_per_token
        self.experts = ExpertMetrics(self.model.load, state.built.module, self.model.parts)
        self.reducer = MetricReducer(
            self.model.objective,
            state.built.module,
            self.model.parts,
            self.optimizer,
            self.mesh,
            experts=self.experts,
        )
        self.numbers = StepNumbers(self.model, self.reducer, state.qk_clip)

    def restore(self) -> None:
        """Load the newest checkpoint of the run and open the report. Without one, a run begins with the state of
        `checkpoint.continue_from`, the weights of `checkpoint.initial`, or initial weights, which no other run draws.

        Raises:
            UserError: a checkpoint is damaged, or training cannot continue from it.
        """
        heals = self.groups is not None and not self.groups.restores
        step = None if heals else self.checkpointer.latest()
        if heals and self.checkpointer.from_leader(known_step(self.folder)):
            self.built.init_weights()  # replaced by those of a living group
        elif step is not None:
            self._load(step)
        elif self.experiment.checkpoint.continue_from is not None:
            self._load_parent()
        else:
            self._load_initial_weights()
        self.model.weights.refresh()
        self.quantize_weights()
        self.report = Report(
            self.experiment,
            self.folder,
            self.mesh,
            self.reducer,
            self.flops_per_token,
            experts=self.experts,
            first_step=self.step,
            groups=self.groups,
        )
        self.profile = ProfileWindow(
            self.experiment.profiling, self.folder.traces, self.mesh.device, first_step=self.step
        )

    def run(self) -> bool:
        """Train to the last step. Returns False if a stop was requested; the state is saved either way.

        Raises:
            Diverged: the loss is not finite and `training.stop_on_nonfinite` is set.
            UserError: the last state could not be saved or exported.
        """
        collection = GarbageCollection(self.experiment.training.gc_every)
        stop = False
        PROGRESS.begin(self.step)
        with contextlib.closing(self.loader), contextlib.closing(collection), contextlib.closing(self.checkpointer):
            while not self._is_over and not stop:
                stop = self._one_step()
                collection.step(self.step)
            if self.groups is not None and not self._finishes(self.groups):
                return self._is_over
            self._save()
            with PROGRESS.phase("the last checkpoint"):
                self.checkpointer.wait()
                exported = not self._is_over or self._export()
                self.checkpointer.finish_uploads(stopped=not self._is_over)
        note_roofline(self.experiment.training, self.report, self.optimizer)
        if self.experiment.checkpoint.mode != "off" and self.checkpointer.durable != self.step:
            raise UserError(
                f"The state after step {self.step} could not be saved; see the log for the reason. Free disk space and "
                "start the run again: it continues from its newest complete checkpoint."
            )
        if not exported:
            raise UserError(
                f"The weights after step {self.step} could not be exported; see the log for the reason. Free disk "
                "space and start the run again: it then exports them."
            )
        if self.groups is not None:
            self._join_groups(self.groups)
        return self._is_over

    def _one_step(self) -> bool:
        """Train one step, then log, evaluate and save if due. Returns True if a stop was requested."""
        if not self._begin_step():
            return False
        experiment, step = self.experiment, self.step + 1
        times = self.report.times
        times.begin()
        self.reducer.begin_step()
        self.profile.before(step)
        self.memory.before(step)
        self._seed()
        position = self.loader.state_dict()
        with times.loading():
            batches = [next(self.loader) for _ in range(self.layout.gradient_accumulation_at(step))]
        if self.model.load is not None:
            self.model.load.set_sequences(experiment.training.batch_size_at(step) // experiment.semi_sync.shares)
        stop, save = self.folder.stop_requested(), self.checkpointer.interval_elapsed()
        batches = self._own(batches)
        tokens, stop, save = sync_step_flags(self.model.objective, batches, self.mesh, stop=stop, save=save)
        commit = None
        if self.groups is not None and self._commits_steps:
            batches = self.groups.share(batches, self.layout.indivisible_microbatches)
            commit = GroupCommit(self.groups, step, self.numbers, self._seed, stop, save)
        if self.clipper is not None:
            self.clipper.step = step
        if self.average is not None:
            self.average.begin_step(step)
        try:
            with times.computing():
                result = train_step(
                    self.model,
                    self.optimizer,
                    batches,
                    tokens=tokens,
                    lr=self.schedule(step),
                    max_grad_norm=experiment.training.max_grad_norm,
                    mesh=self.mesh,
                    clipper=self.clipper,
                    commit=commit,
                )
        except StepRefused:
            self.optimizer.zero_grad()
            if self.model.load is not None:
                self.model.load.discard()
            self.loader.seek(position)
            return False
        if commit is not None:
            stop, save = commit.stop, commit.save
        self.step, self.tokens = step, self.tokens + result.tokens
        times.end()
        self.profile.after(step)
        self.memory.after(step, self.model.parts, self.optimizer, self.model.weights.copies, self.report.memory.read)
        self.report.step(step, result.tokens * self._shares)
        PROGRESS.step(step)
        return self._after_step(result, stop=stop, save=save or self.checkpointer.due(step))

    def _begin_step(self) -> bool:
        """Join the replica groups of the next step. Returns False if there is none."""
        return self.groups is None or self._join_groups(self.groups)

    def _own(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Micro-batches of a step that this group's loss is a mean of."""
        return batches

    def _seed(self) -> None:
        seed_step(self.experiment.experiment.seed, self.step + 1, self.mesh.dp_rank, self.mesh.device)

    def _join_groups(self, groups: ReplicaGroups) -> bool:
        """Wait for the groups of the next step, and heal or let others heal. Returns False if training is over."""
        quorum = groups.join(self.step, self._position)
        while (quorum.behind or quorum.source is not None) and not self._heal(groups, behind=quorum.source is not None):
            quorum = groups.join(self.step, self._position)
        self.report.join_groups(self.step)
        return not self._is_over

    def _heal(self, groups: ReplicaGroups, *, behind: bool) -> bool:
        """Send the state to groups that are behind, or take over another's. Returns False if that has not arrived."""
        parts = self.model.parts
        free_gathered(parts)

        def tensors(description: Any = None) -> list[Tensor]:
            return [local_tensor(x) for x in healing_state(parts, self.optimizer, description).values()]

        if not behind:
            state = described(parts, self.optimizer, healing_state(parts, self.optimizer))
            also = {"data": self.loader.state_dict(), "rows": self.report.last_rows, "state": state}
            groups.send_state({**self._progress(), **also}, tensors())
            return True
        progress = groups.receive_state(lambda progress: tensors(progress["state"]))
        if progress is None:
            return False
        sync_tied_state(parts, self.optimizer)
        self.step, self.tokens = progress["step"], progress["tokens"]
        self._restore_average(progress)
        self.loader.seek(progress["data"])
        self.report.last_rows = progress["rows"]
        self._after_healing(progress)
        self.model.weights.refresh()
        self.quantize_weights()
        get_logger().info("healed: continuing after step %d", self.step)
        return True

    def _after_healing(self, progress: Mapping[str, Any]) -> None:
        """Take over what else another group has sent."""

    def _finishes(self, groups: ReplicaGroups) -> bool:
        """True in the group that saves and exports the last state; in the others False, once that is done."""
        while not groups.leads:
            leader = groups.leader
            self._join_groups(groups)  # the leader joins when it has finished, or is dead
            if groups.leader == leader:
                return False
        return True

    @property
    def _evaluates(self) -> bool:
        """True if an evaluation is due after this step."""
        every = self.experiment.training.evaluate_every
        return self.validation is not None and (self._is_over or self.step % every == 0)

    def _evaluate(self) -> dict[str, float | int | None]:
        """Metrics of an evaluation, if one is due."""
        numbers: dict[str, float | int | None] = {}
        if self.validation is not None and self._evaluates:
            with PROGRESS.phase("the evaluation"), self.report.throughput.pause("evaluation"):
                numbers |= evaluate_split(self.model, self.validation, self.mesh)
                if self.average is not None and self.average.steps:
                    with self.average.in_use():
                        numbers |= averaged_row(evaluate_split(self.model, self.validation, self.mesh))
        return numbers

    def _after_step(self, result: StepResult, *, stop: bool, save: bool) -> bool:
        """Evaluate, log and save, in this order: a checkpoint never exists without the rows before it. Returns True if
        a stop was requested."""
        step, last, numbers = self.step, self._is_over, self._evaluate()
        if numbers or last or stop or save or step % self.experiment.tracking.log_every == 0:
            numbers |= {**self.loader.epoch_metrics(), **self.checkpointer.pop_timings()}
            loss = self.report.log(step, self.tokens, result, lr=self.schedule(step), also=numbers)
            if self.experiment.training.stop_on_nonfinite:
                require_finite(step, loss, float(result.grad_norm))
        self._finish_step(save=save)
        return stop

    def _finish_step(self, *, save: bool) -> None:
        step, last = self.step, self._is_over
        if self.images is not None and self.images.due(step, last=last):
            with PROGRESS.phase("the images"), self.report.throughput.pause("images"):
                self.images.write(self.folder, step, self.model, self.average, self.report.image)
        self.checkpointer.poll()
        if save:
            self._save()
        self.report.warn(self.checkpointer.warning())
        if self.exports.due(step) and not last and (self.groups is None or self.groups.leads):
            self._export()

    def _export(self) -> bool:
        with PROGRESS.phase("the export"), self.report.throughput.pause("export"):
            return self.exports.write(self.step, self.model.parts)

    def _save(self) -> None:
        if self.groups is not None and not self.groups.leads:
            return
        with PROGRESS.phase("the checkpoint"), self.report.throughput.pause("checkpoint"):
            self.checkpointer.save(
                self.step,
                self.model.parts,
                self.optimizer,
                self.loader.state_dict(),
                self._progress(),
                weights_only=self._is_over and self.experiment.checkpoint.last == "weights",
                group_states=self._group_states,
            )

    def _progress(self) -> dict[str, Any]:
        averaging = {} if self.average is None else {AVERAGE: self.average.progress()}
        return {"step": self.step, "tokens": self.tokens, "config": to_dict(self.experiment), **averaging}

    @property
    def _is_over(self) -> bool:
        return self.step >= self.experiment.training.last_step

    def _load(self, step: int) -> None:
        restored = self.checkpointer.load(step, self.model.parts, self.optimizer)
        self.step, self.tokens = restored.progress["step"], restored.progress["tokens"]
        self._restore_average(restored.progress)
        if not restored.progress.get(WEIGHTS_ONLY_KEY):
            self.loader.load_state_dict(restored.data)
        elif not self._is_over:
            raise UserError(
                f"{self.checkpointer.folder.path_of(step)} holds weights only (checkpoint.last=weights): training "
                f"cannot continue after step {step}. Start a new run from them: checkpoint.initial={self.folder.path}"
            )
        get_logger().info("continuing after step %d", self.step)
        self._log_changes(restored.progress.get("config"))

    def _load_parent(self) -> None:
        """Begin with the whole state of `checkpoint.continue_from`."""
        cache = cache_of(self.folder, self.experiment.experiment.name) / "remote"
        restored, lineage = load_parent_state(
            self.experiment,
            self.checkpointer,
            self.model.parts,
            self.optimizer,
            cache=cache,
            lineage=Lineage.read(self.folder.path),
        )
        self.step, self.tokens = lineage.step, lineage.tokens
        self._restore_average(restored.progress)
        if self._is_over:
            raise UserError(
                f"checkpoint.continue_from={self.experiment.checkpoint.continue_from}: its checkpoint is of step "
                f"{self.step}, and this run ends at step {self.experiment.training.last_step}. Give more steps "
                "(training.steps, training.stop_after)."
            )
        if self.experiment.checkpoint.continue_data == "same":
            self.loader.load_state_dict(restored.data)
        if dist.get_rank() == 0:
            lineage.write(self.folder.path)
            log_lineage(self.folder)
        self._log_changes(restored.progress.get("config"))

    def _restore_average(self, progress: Mapping[str, Any]) -> None:
        shorter = None if self.average is None else self.average.restore(progress.get(AVERAGE), self.step)
        if shorter is not None:
            get_logger().warning(shorter)

    def _log_changes(self, saved: Any) -> None:
        changed = differences(saved, to_dict(self.experiment))
        if changed:
            get_logger().info("changed since that checkpoint; the new values apply:%s", "".join(changed))

    def _load_initial_weights(self) -> None:
        """Load `checkpoint.initial`, if given, and initialize the weights that it does not give."""
        config = self.experiment.checkpoint
        if config.initial is None:
            self.built.init_weights()
            return
        exclude = config.initial_exclude
        self.built.init_weights(lambda name: any(fnmatchcase(name, pattern) for pattern in exclude))
        cache = cache_of(self.folder, self.experiment.experiment.name)
        path = str(local_copy(config.initial, cache=cache / "remote"))
        require_same_function(self.experiment, path)
        folder = huggingface_folder(path)
        if folder is None:
            self.checkpointer.load_initial_weights(self.model.parts, path)
            return
        for part in self.model.parts:
            load_hf_sharded(part, self.experiment.model, folder, exclude, config.accept_changes)
        get_logger().info("weights from %s", folder)
