"""Saving and loading the training state: in the background or not, complete or not at all."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from titan_exp.checkpoint.dcp.async_save import AsyncSaver
from titan_exp.checkpoint.dcp.checksums import find_damage_on_ranks, has_checksums, require_intact
from titan_exp.checkpoint.dcp.storage_reader import load_into, tensor_shapes
from titan_exp.checkpoint.dcp.storage_writer import PublishingWriter
from titan_exp.checkpoint.init_from import load_initial_weights
from titan_exp.checkpoint.remote.background_upload import STOP_SECONDS, BackgroundUploader, steps_to_upload
from titan_exp.checkpoint.remote.remote_folder import RemoteError
from titan_exp.checkpoint.remote.remote_run import CONFIG, RemoteRun
from titan_exp.checkpoint.remote.run_download import download_newer
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.state_dict import (
    DATA_PREFIX,
    OPTIMIZER_PREFIX,
    PROGRESS_KEY,
    WEIGHTS_ONLY_KEY,
    decode_json,
    encode_json,
    init_optimizer_state,
    model_state_dict,
    optimizer_state_dict,
    sync_tied_state,
    training_state_dict,
)
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.config.paths.checkpoint_paths import saved_state
from titan_exp.parallel.mesh import new_cpu_group
from titan_exp.tracking.logging import get_logger


@dataclass(frozen=True)
class RestoredState:
    """What a checkpoint says besides tensors."""

    progress: dict[str, Any]
    """Counters of the run."""
    data: dict[str, Any]
    """State of every virtual shard."""


class Checkpointer:
    """Saves and loads the state of one run; every method is called by all ranks together.

    Args:
        config: mode, interval, retention.
        path: the run's `checkpoints/` folder.
        clock: seconds, for the interval by wall-clock and for how long saves take.
        remote: where complete checkpoints are kept as well.

    Raises:
        UserError: the folder, or the remote place, cannot be written.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        remote: RemoteRun | None = None,
    ) -> None:
        self.config = config
        self.folder = CheckpointFolder(path)
        self._pending: _Save | None = None
        self.durable: int | None = None
        """Step of the last checkpoint that this process knows to be complete."""
        self._newest: int | None = None
        self._clock = clock
        self._last = clock()
        self._times: dict[str, float] = {}
        self._background: AsyncSaver | None = None
        # A group of its own: a background save must not meet the training step's collectives.
        self._group = new_cpu_group()
        self._leader = dist.get_rank() == 0
        self._remote = remote
        self._uploads = None if remote is None else BackgroundUploader(remote, self.folder, config, clock)
        if config.mode != "off":
            self._prepare()

    def interval_elapsed(self) -> bool:
        """Whether this process's clock asks for a checkpoint. Clocks differ: the ranks must agree on rank 0's."""
        minutes = self.config.every_minutes
        return self.config.mode != "off" and minutes is not None and self._clock() - self._last >= 60 * minutes

    def due(self, step: int) -> bool:
        """Whether a checkpoint is asked for after this step, whatever the clock says."""
        every = self.config.every
        return self.config.mode != "off" and every is not None and step % every == 0

    def pop_timings(self) -> dict[str, float]:
        """Seconds of the saves that have ended since the last call, as keys of a row: the last one's.

        `checkpoint_pause` is for how long training stood still, `checkpoint_write` how long the writing took,
        `checkpoint_upload` how long, behind training's back, the last upload to the remote place.
        """
        times, self._times = self._times, {}
        uploaded = None if self._uploads is None else self._uploads.pop_seconds()
        if uploaded is not None:
            times["checkpoint_upload"] = uploaded
        return times

    def save(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        data: Mapping[str, Any],
        progress: Mapping[str, Any],
        *,
        weights_only: bool = False,
    ) -> None:
        """Save the state after a step, once. In async mode training may go on as soon as this returns.

        With `weights_only`, neither optimizer nor data state is: no run can be continued from such a checkpoint.
        """
        if self.config.mode == "off":
            return
        begin = self._clock()
        if self._is_saved(step):
            return
        self._last = begin
        self.wait()
        if weights_only:
            state = {**model_state_dict(parts), PROGRESS_KEY: encode_json({**progress, WEIGHTS_ONLY_KEY: True})}
        else:
            state = training_state_dict(parts, optimizer, data, progress)
        writer = PublishingWriter(self.folder, step)
        save = self._pending = _Save(step, begin, self._clock())
        self._newest = step
        if self.config.mode == "sync":
            save.write = lambda: dcp.save(state, storage_writer=writer, process_group=self._group)
            self.wait()
        else:
            if self._background is None:
                self._background = AsyncSaver(self.config.mode, self._group)
            background, future = self._background, self._background.start(state, writer)
            save.write, save.future = lambda: background.result(future), future
            save.paused = self._clock() - begin
            future.add_done_callback(lambda _: save.end(self._clock()))

    def poll(self) -> None:
        """Take note of a background save that has ended; called between steps."""
        if self._pending is not None and self._pending.future is not None and self._pending.future.done():
            self.wait()

    def wait(self) -> None:
        """Wait until a background save is durable.

        A save that failed (a full disk) is reported and forgotten: the last complete checkpoint stays.
        """
        if self._pending is None:
            return
        save, self._pending = self._pending, None
        try:
            save.write()
        except (dcp.CheckpointException, OSError) as error:
            # torch raises on every rank where the writing of one has failed.
            get_logger().error(
                "the checkpoint of step %d could not be written (%s); training goes on, and %s",
                save.step,
                _cause(error),
                "there is none yet"
                if self.durable is None
                else f"the newest complete one is that of step {self.durable}",
            )
            self._newest = None
            if self._leader:
                self.folder.discard_partial(save.step)
            return
        self.durable = save.step
        save.end(self._clock())
        self._times = {"checkpoint_pause": save.paused, "checkpoint_write": save.ended - save.began}
        get_logger().info(
            "saved step %d: training paused for %.3f s, written in %.3f s",
            save.step,
            save.paused,
            save.ended - save.began,
        )
        if self._leader:
            if self._uploads is not None:
                self._uploads.offer(save.step)
            self._retain()

    def finish_uploads(self, *, stopped: bool) -> None:
        """Wait for uploads on their way: `remote_wait_minutes` at most, and after a request to stop 60 s at most.

        What has not arrived then is given up, and said; it is complete here.
        """
        if self._uploads is not None:
            seconds = 60 * self.config.remote_wait_minutes
            self._uploads.finish(min(seconds, STOP_SECONDS) if stopped else seconds)
            if self._leader:
                self._retain()

    def close(self) -> None:
        """Wait for a save that is on its way, and give back what saving has held; uploads are given up."""
        if self._uploads is not None:
            self._uploads.abandon()
        self.wait()
        if self._background is not None:
            self._background.close()
            self._background = None

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint that is as it was written; all ranks agree on it.

        Newer ones that are damaged are named in the log and set aside. Where the remote place holds a newer good one,
        that is fetched first.

        Raises:
            UserError: there are checkpoints, and all of them are damaged; or the remote place must be asked, and does
                not answer.
        """
        step, damaged = self._newest_intact()
        if self._remote is not None:
            fetched = download_newer(self._remote, self.folder, step, self._group)
            step = step if fetched is None else fetched
            if fetched in damaged:
                get_logger().error("the checkpoint of step %d was damaged here: %s", fetched, damaged.pop(fetched))
        if step is not None:
            self._set_aside(damaged, step)
        elif damaged:
            listed = "".join(f"\n  step {one}: {damage}" for one, damage in damaged.items())
            raise UserError(
                f"No checkpoint in {self.folder.path} is intact:{listed}\n"
                "Put back a copy of one of them, or move the folder away: the run then starts from the beginning."
            )
        self._start_uploads()
        return step

    def _newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """Its step, and what is wrong with each newer one."""
        steps: list[Any] = [self.folder.complete_steps() if self._leader else None]
        dist.broadcast_object_list(steps, src=0, group=self._group)
        damaged: dict[int, str] = {}
        for step in reversed(steps[0]):
            damage = find_damage_on_ranks(self.folder.path_of(step), self._group)
            if damage is None:
                if not has_checksums(self.folder.path_of(step)):
                    get_logger().info("the checkpoint of step %d is from before checksums: none was checked", step)
                return step, damaged
            damaged[step] = damage
        return None, damaged

    def _start_uploads(self) -> None:
        """Begin with what has been saved here and has not arrived there."""
        if self._uploads is None or self._remote is None:
            return
        missing: list[int] = []
        if self._leader:
            try:
                missing = steps_to_upload(self._remote, self.folder, self.config.keep_every)
            except RemoteError as error:
                get_logger().error("what has not been uploaded yet cannot be told now: %s", error)
        self._uploads.start(missing)

    def load(self, step: int, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> RestoredState:
        """Load a checkpoint, made in any layout, into the model (or its parts on this rank) and the optimizer.

        Of a checkpoint that holds weights only, these and the progress.
        """
        path = self.folder.path_of(step)
        shapes = tensor_shapes(path)
        progress = _read_notes(path, shapes, PROGRESS_KEY)[PROGRESS_KEY]
        if progress.get(WEIGHTS_ONLY_KEY):
            load_into(path, model_state_dict(parts))
            data: dict[str, Any] = {}
        else:
            # Before the first step an optimizer has no state, and none is saved.
            if any(key.startswith(OPTIMIZER_PREFIX) for key in shapes):
                init_optimizer_state(parts, optimizer)
            load_into(path, {**model_state_dict(parts), **optimizer_state_dict(parts, optimizer)})
            data = {
                key.removeprefix(DATA_PREFIX): state for key, state in _read_notes(path, shapes, DATA_PREFIX).items()
            }
        sync_tied_state(parts, optimizer)
        self._newest = self.durable = step
        return RestoredState(progress, data)

    def load_initial_weights(self, parts: Sequence[nn.Module], place: str | None = None) -> None:
        """Load weights of another run into the model, as `checkpoint.initial` and `initial_exclude` say.

        `place` is where what `checkpoint.initial` names has been fetched to, where that is a URL.

        Raises:
            UserError: it is damaged, or does not fit the model: with every weight that is missing, unexpected or of
                another shape.
        """
        assert self.config.initial is not None, "the caller has asked"
        path = saved_state(place or self.config.initial)
        if path is None:
            raise UserError(f"checkpoint.initial={self.config.initial}: there is no complete checkpoint")
        require_intact(path, self._group)
        load_initial_weights(path, parts, self.config.initial_exclude, self._group)

    def _is_saved(self, step: int) -> bool:
        """Whether this step was saved on every rank: a writing process may die when others have had their answer."""
        if self.config.mode != "async_process":
            return step == self._newest
        self.wait()
        saved = torch.tensor([step == self._newest], dtype=torch.uint8)
        dist.all_reduce(saved, op=dist.ReduceOp.MIN, group=self._group)
        return bool(saved)

    def _prepare(self) -> None:
        """Make the folder, without the rubble of earlier attempts."""
        failure: list[Any] = [None]
        if self._leader:
            try:
                self.folder.path.mkdir(parents=True, exist_ok=True)
                self.folder.remove_stale()
            except OSError as error:
                failure[0] = f"{error.filename or self.folder.path}: {error.strerror or error}"
            if self._remote is not None and failure[0] is None:
                try:
                    self._remote.write_config(self.folder.path.parent / CONFIG)
                except RemoteError as error:
                    if error.permanent:
                        failure[0] = str(error)
                    else:
                        get_logger().error("the remote place cannot be written to now: %s", error)
        dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0] is not None:
            raise UserError(
                f"Checkpoints cannot be written: {failure[0]}. Make the place writable, or train without: "
                f"{'checkpoint=none' if self._remote is None else 'checkpoint.remote=null'}"
            )

    def _retain(self) -> None:
        try:
            needed = set() if self._uploads is None else self._uploads.needed()
            self.folder.apply_retention(self.config.keep, self.config.keep_every, needed)
        except OSError as error:
            get_logger().error("old checkpoints could not be deleted: %s", error)

    def _set_aside(self, damaged: Mapping[int, str], used: int) -> None:
        for step, damage in damaged.items():
            where = "it stays where it is"
            if self._leader:
                try:
                    where = f"it is now {self.folder.quarantine(step).name}"
                except OSError as error:
                    where = f"it could not be renamed ({error.strerror or error})"
            get_logger().error(
                "the checkpoint of step %d is damaged: %s; that of step %d is used instead, and %s",
                step,
                damage,
                used,
                where,
            )


@dataclass
class _Save:
    """One save on its way."""

    step: int
    begin: float
    """When training stopped for it."""
    began: float
    """When writing began."""
    write: Callable[[], object] = lambda: None
    """Returns when it is durable, or raises."""
    future: Future[Any] | None = None
    """Of a save in the background."""
    paused: float = -1.0
    """Seconds that training stood still; below 0 while it does."""
    ended: float = -1.0
    """When it was durable; below 0 before."""

    def end(self, now: float) -> None:
        """It is durable; the first call counts."""
        if self.ended < 0:
            self.ended = now
        if self.paused < 0:
            self.paused = now - self.begin


def _read_notes(path: Path, shapes: Mapping[str, torch.Size], prefix: str) -> dict[str, Any]:
    """What a checkpoint holds besides weights and optimizer state, under keys with a prefix."""
    notes = {key: torch.empty(shape, dtype=torch.uint8) for key, shape in shapes.items() if key.startswith(prefix)}
    load_into(path, notes)
    return {key: decode_json(note) for key, note in notes.items()}


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank where something did, in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        rank, (cause, _) = sorted(error.failures.items())[0]
        return f"rank {rank}: {cause}"
    return str(error)


def load_model(path: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights alone into a model.

    Raises:
        UserError: the checkpoint is damaged.
    """
    require_intact(path)
    load_into(path, model_state_dict([model]))
