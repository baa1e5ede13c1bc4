"""Checkpointer: saves the training state atomically, optionally in the background, and restores it in any layout."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from titan_exp.checkpoint.async_save import AsyncSaver
from titan_exp.checkpoint.background_upload import CONFIG, STOP_SECONDS, BackgroundUploader, RemoteRun, steps_to_upload
from titan_exp.checkpoint.download import download_newer
from titan_exp.checkpoint.load_state import (
    PROGRESS_KEY,
    WEIGHTS_ONLY_KEY,
    RestoredState,
    average_state_dict,
    encode_json,
    load_initial_weights,
    load_state,
    model_state_dict,
    read_progress,
    training_state_dict,
)
from titan_exp.checkpoint.optimizer_state import differing_between_ranks
from titan_exp.checkpoint.remote_folder import RemoteError
from titan_exp.checkpoint.retention import CheckpointFolder, SaveFailures
from titan_exp.checkpoint.storage_writer import PublishingWriter, find_damage_on_ranks, has_checksums, require_intact
from titan_exp.config.checkpoint_files import saved_state
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import CheckpointConfig
from titan_exp.parallel.mesh import from_rank_0, gather_objects, new_cpu_group
from titan_exp.tracking.logging import get_logger

T = TypeVar("T")
MAX_NAMED = 3  # maximum number of keys named in one message


class Checkpointer:
    """Saves and loads the training state of one run in `path`; all ranks call every method together. Complete
    checkpoints are also uploaded to `remote`. `clock` is in seconds. Without `prepare`, the folder stays as it is,
    because another world of the run may be writing to it. Raises UserError if a folder is not writable."""

    def __init__(
        self,
        config: CheckpointConfig,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        remote: RemoteRun | None = None,
        prepare: bool = True,
    ) -> None:
        self.config = config
        self.folder = CheckpointFolder(path)
        self._pending: _PendingSave | None = None
        self.durable: int | None = None
        """Step of the last checkpoint that this process knows to be complete."""
        self._newest: int | None = None
        self._differing: set[str] = set()
        """Keys whose values were found to differ between ranks."""
        self._clock = clock
        self._failures = SaveFailures(self.folder, config.fail_after_minutes, clock)
        self._last_save = clock()
        self._timings: dict[str, float] = {}
        self._async_saver: AsyncSaver | None = None
        # Separate group: a background save must not interleave with the training step's collectives.
        self._group = new_cpu_group()
        self._leader = torch.distributed.get_rank() == 0
        self._remote = remote
        self._uploader = None if remote is None else BackgroundUploader(remote, self.folder, config, clock)
        if config.mode != "off" and prepare:
            self._prepare_folder()

    def interval_elapsed(self) -> bool:
        """True if `every_minutes` have passed on this process's clock, or if saves have failed for so long that one
        more decides. Clocks differ, so use rank 0's result."""
        minutes = self.config.every_minutes
        if self._pending is None and self._failures.retry_due:
            return True
        return self.config.mode != "off" and minutes is not None and self._clock() - self._last_save >= 60 * minutes

    def due(self, step: int) -> bool:
        """True if `every` requires a checkpoint after this step."""
        every = self.config.every
        return self.config.mode != "off" and every is not None and step % every == 0

    def warning(self) -> str | None:
        """Warning about failing saves and uploads, for users who watch the run; None while both succeed."""
        uploads = None if self._uploader is None else self._uploader.warning
        return "; ".join(filter(None, [self._failures.warning, uploads])) or None

    def pop_timings(self) -> dict[str, float]:
        """Metrics in seconds of the last save completed since the previous call: `checkpoint_pause` of training,
        `checkpoint_write` until the checkpoint was durable, `checkpoint_upload` of the last background upload."""
        timings, self._timings = self._timings, {}
        uploaded = None if self._uploader is None else self._uploader.pop_seconds()
        if uploaded is not None:
            timings["checkpoint_upload"] = uploaded
        return timings

    def save(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        data: Mapping[str, Any],
        progress: Mapping[str, Any],
        *,
        weights_only: bool = False,
        other_worlds: Mapping[str, Tensor] = {},
    ) -> None:
        """Save the state after a step, with states of `other_worlds` by key, unless already saved. In async modes
        training may continue on return. With `weights_only`, optimizer and data state are omitted; such a checkpoint
        cannot resume a run. Raises UserError on rank 0 if saves have failed for longer than `fail_after_minutes`."""
        if self.config.mode == "off":
            return
        begin = self._clock()
        saved = step == self._newest
        if self.config.mode == "async_process":  # a save process may be killed after others reported success
            self.wait()
            saved = all(gather_objects(step == self._newest, self._group))
        if saved:
            return
        self._last_save = begin
        self.wait()
        self._require_within_limit()
        if self._leader and self.durable is not None and self.folder.newest_step() is None:
            text = "the checkpoints in %s are gone. Until that of step %d is complete, an interrupted run %s"
            get_logger().warning(text, self.folder.path, step, "starts from the beginning")
        if weights_only:
            weights = {**model_state_dict(parts), **average_state_dict(parts, optimizer)}
            state = {**weights, PROGRESS_KEY: encode_json({**progress, WEIGHTS_ONLY_KEY: True})}
        else:
            state = {**training_state_dict(parts, optimizer, data, progress), **other_worlds}
            self._name_differing(differing_between_ranks(state, self._group))
        writer = PublishingWriter(self.folder, step)
        save = self._pending = _PendingSave(step, begin, self._clock())
        self._newest = step
        if self.config.mode == "sync":
            save.wait = lambda: dcp.save(state, storage_writer=writer, process_group=self._group)
            self.wait()
            self._require_within_limit()
        else:
            if self._async_saver is None:
                self._async_saver = AsyncSaver(self.config.mode, self._group)
            saver, future = self._async_saver, self._async_saver.start(state, writer)
            save.wait, save.future = lambda: saver.wait(future), future
            save.pause_seconds = self._clock() - begin
            future.add_done_callback(lambda _: save.mark_durable(self._clock()))

    def poll(self) -> None:
        """Finalize a completed background save; called between steps. Raises like `save`."""
        if self._pending is not None and self._pending.future is not None and self._pending.future.done():
            self.wait()
            self._require_within_limit()

    def _require_within_limit(self) -> None:
        if self._leader:  # the other ranks end when rank 0 does
            self._failures.require_within_limit()

    def wait(self) -> None:
        """Wait until the pending save is durable. A failed one (disk full) is logged and dropped."""
        if self._pending is None:
            return
        save, self._pending = self._pending, None
        try:
            save.wait()
        except (dcp.CheckpointException, OSError) as error:
            # torch raises on every rank if one of them fails to write.
            cause = str(error)
            if isinstance(error, dcp.CheckpointException) and error.failures:
                rank = min(error.failures)
                cause = f"rank {rank}: {error.failures[rank][0]}"
            self._failures.add(cause)
            text = "could not write the checkpoint of step %d (%s). Training continues, and %s"
            get_logger().error(text, save.step, cause, self._failures.newest)
            self._newest = None
            if self._leader:
                self.folder.discard_partial(save.step)
            return
        self.durable = save.step
        self._failures.clear()
        save.mark_durable(self._clock())
        write_seconds = save.durable_at - save.write_started
        self._timings = {"checkpoint_pause": save.pause_seconds, "checkpoint_write": write_seconds}
        text = "saved step %d: training paused for %.3f s, written in %.3f s"
        get_logger().info(text, save.step, save.pause_seconds, write_seconds)
        if self._leader:
            if self._uploader is not None:
                self._uploader.offer(save.step)
            self._apply_retention()

    def finish_uploads(self, *, stopped: bool) -> None:
        """Wait for uploads, at most `remote_wait_minutes`, and 60 s after a stop request. Unfinished ones are cancelled
        and logged; the local checkpoint is complete."""
        if self._uploader is not None:
            seconds = 60 * self.config.remote_wait_minutes
            self._uploader.finish(min(seconds, STOP_SECONDS) if stopped else seconds)
            if self._leader:
                self._apply_retention()

    def close(self) -> None:
        """Wait for a pending save, cancel uploads, and release the buffers and processes of async saving."""
        if self._uploader is not None:
            self._uploader.cancel()
        self.wait()
        if self._async_saver is not None:
            self._async_saver.close()
            self._async_saver = None

    def latest(self) -> int | None:
        """Step of the newest intact checkpoint, the same on all ranks. Newer damaged checkpoints are logged and
        quarantined. A newer intact remote checkpoint is downloaded first. Raises UserError if all checkpoints are
        damaged, or the remote store is needed and unreachable."""
        step, damaged = self._newest_intact()
        if self._remote is not None:
            downloaded = download_newer(self._remote, self.folder, step, self._group)
            step = step if downloaded is None else downloaded
            if downloaded in damaged:
                damage = damaged.pop(downloaded)
                get_logger().error("the local checkpoint of step %d is damaged: %s", downloaded, damage)
        if step is not None:
            self._quarantine(damaged, step)
        elif damaged:
            listed = "".join(f"\n  step {step}: {damage}" for step, damage in damaged.items())
            raise UserError(
                f"No checkpoint in {self.folder.path} is intact:{listed}\n"
                "Restore one of them from a copy, or move the folder away to start from the beginning."
            )
        self._start_uploads()
        return step

    def _newest_intact(self) -> tuple[int | None, dict[int, str]]:
        steps, damaged = self.from_leader(self.folder.complete_steps() if self._leader else []), dict[int, str]()
        for step in reversed(steps):
            damage = find_damage_on_ranks(self.folder.path_of(step), self._group)
            if damage is None:
                if not has_checksums(self.folder.path_of(step)):
                    checked = "so we checked only the sizes of its files"
                    get_logger().info("the checkpoint of step %d is older than checksums, %s", step, checked)
                return step, damaged
            damaged[step] = damage
        return None, damaged

    def _start_uploads(self) -> None:
        if self._uploader is None or self._remote is None:
            return
        missing: list[int] = []
        if self._leader:
            try:
                missing = steps_to_upload(self._remote, self.folder, self.config.keep_every)
            except RemoteError as error:
                get_logger().error("cannot upload earlier checkpoints now: %s", error)
        self._uploader.start(missing)

    def load(
        self, step: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, keeps: Collection[str] = ()
    ) -> RestoredState:
        """Load a checkpoint, saved in any layout, into the model (or its parts on this rank) and the optimizer. A
        weights-only one restores weights and progress; `keeps` is as in `load_state`."""
        restored = load_state(self.folder.path_of(step), parts, optimizer, keeps)
        self._newest = self.durable = step
        return restored

    def from_leader(self, value: T) -> T:
        """Broadcast rank 0's value to all ranks."""
        return from_rank_0(value, self._group)

    def read_parent(self, path: Path) -> dict[str, Any]:
        """Verify the checkpoint of another run and read its progress. Raises UserError if it is damaged."""
        require_intact(path, self._group)
        return read_progress(path)

    def load_initial_weights(self, parts: Sequence[nn.Module], local_path: str | None = None) -> None:
        """Load the weights of `checkpoint.initial`, except those matching `initial_exclude`. `local_path` is the
        download if `checkpoint.initial` is a URL. Raises UserError if it is damaged or does not fit the model, listing
        every missing, unexpected or reshaped weight."""
        assert self.config.initial is not None, "the caller checks"
        path = saved_state(local_path or self.config.initial)
        if path is None:
            raise UserError(f"checkpoint.initial={self.config.initial}: there is no complete checkpoint at this path")
        require_intact(path, self._group)
        load_initial_weights(path, parts, self.config.initial_exclude, self._group)

    def _name_differing(self, keys: Sequence[str]) -> None:
        """Log once which optimizer state of a resumed run comes from a single rank."""
        new = [key for key in keys if key not in self._differing]
        self._differing |= set(new)
        if new:
            get_logger().error(
                "ranks disagree about %s%s of the optimizer's state, and a checkpoint has the values of one of them: a "
                "resumed run will differ. Sum them over ranks, or keep them in tensors of the parameter's shape",
                ", ".join(new[:MAX_NAMED]),
                f" and {len(new) - MAX_NAMED} more" if len(new) > MAX_NAMED else "",
            )

    def _prepare_folder(self) -> None:
        failure = None
        if self._leader:
            try:
                self.folder.path.mkdir(exist_ok=True)
                self.folder.remove_stale()
            except OSError as error:
                failure = f"{error.filename or self.folder.path}: {error.strerror or error}"
            if self._remote is not None and failure is None:
                try:
                    self._remote.write_config(self.folder.path.parent / CONFIG)
                except RemoteError as error:
                    if error.permanent:
                        failure = str(error)
                    else:
                        get_logger().error("cannot write to checkpoint.remote now: %s", error)
        if (failure := self.from_leader(failure)) is not None:
            without = "checkpoint=none" if self._remote is None else "checkpoint.remote=null"
            remedy = f"Make the folder writable, or train without: {without}"
            raise UserError(f"Cannot write checkpoints: {failure}. {remedy}")

    def _apply_retention(self) -> None:
        try:
            in_use = set() if self._uploader is None else self._uploader.steps_in_use()
            self.folder.apply_retention(self.config.keep, self.config.keep_every, in_use)
        except OSError as error:
            get_logger().error("could not delete old checkpoints in %s: %s", self.folder.path, error)

    def _quarantine(self, damaged: Mapping[int, str], used: int) -> None:
        for step, damage in damaged.items():
            result = "it stays where it is"
            if self._leader:
                try:
                    result = f"it is now in {self.folder.quarantine(step).name}"
                except OSError as error:
                    result = f"it stays where it is, since we cannot move it ({error.strerror or error})"
            text = "the checkpoint of step %d is damaged: %s. We use that of step %d instead, and %s"
            get_logger().error(text, step, damage, used, result)


@dataclass
class _PendingSave:
    step: int
    begin: float  # start of the training pause
    write_started: float
    wait: Callable[[], object] = lambda: None  # blocks until the checkpoint is durable; raises if the save failed
    future: Future[Any] | None = None
    pause_seconds: float = -1.0  # duration of the training pause; negative until it ends
    durable_at: float = -1.0  # time at which the checkpoint became durable; negative before

    def mark_durable(self, now: float) -> None:
        """Record the end of the save; the first call counts."""
        if self.durable_at < 0:
            self.durable_at = now
        if self.pause_seconds < 0:
            self.pause_seconds = now - self.begin
