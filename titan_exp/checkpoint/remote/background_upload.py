"""Uploads behind training's back: each rank a thread that sends its share, rank 0 the word that all shares are there.

Training never waits for them, but for the bounded time that `finish` is given.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from titan_exp.checkpoint.dcp.checksums import has_checksums
from titan_exp.checkpoint.remote.remote_folder import RemoteError
from titan_exp.checkpoint.remote.remote_run import RemoteRun
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.tracking.logging import get_logger

STOP_SECONDS = 60.0
"""How long a run that was asked to stop waits for its uploads at most: an allocation may be about to end."""
MARGIN = 20.0
"""Seconds in which a transfer that is asked to give up does so, and in which the ranks take leave of each other."""
_FOREVER = timedelta(days=365)


class BackgroundUploader:
    """The uploads of one run, one checkpoint at a time. All ranks make it together.

    Rank 0 says which checkpoint comes next: the newest that is durable here. One that has not been begun when a newer
    one is durable is skipped; where it is to be kept for ever, it is sent when nothing newer waits, as is one whose
    upload has failed.

    Args:
        run: where to.
        folder: the complete checkpoints of this run.
        config: what is kept.
        clock: seconds.
    """

    def __init__(
        self,
        run: RemoteRun,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._folder, self._config, self._clock = run, folder, config, clock
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # A group of its own, whose ranks wait as long as there is nothing to send.
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._current: int | None = None
        self._missed: set[int] = set()
        self._closing = self._give_up = self._last_try = False
        self._failed: int | None = None
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def start(self, steps: list[int]) -> None:
        """Begin, with checkpoints that are here already and not there, ascending; all ranks call it, rank 0 knows.

        A second call changes nothing.
        """
        if self._thread.ident is not None:
            return
        self._missed = set(steps[:-1])
        self._waiting = steps[-1] if steps else None
        self._thread.start()

    def offer(self, step: int) -> None:
        """On rank 0: a checkpoint is durable here. Returns at once."""
        with self._changed:
            if self._waiting is not None:
                get_logger().warning(
                    "uploads are slower than saves: the checkpoint of step %d is skipped for that of step %d, and %s",
                    self._waiting,
                    step,
                    f"{self._run.url} does not get it" if not self._for_ever(self._waiting) else "sent later",
                )
                self._miss(self._waiting)
            self._waiting = step
            self._changed.notify_all()

    def needed(self) -> set[int]:
        """On rank 0: steps of the checkpoints that must stay here for now."""
        with self._changed:
            return {step for step in (self._waiting, self._current) if step is not None}

    def pop_seconds(self) -> float | None:
        """How long the last upload that has succeeded since the last call took; None where none has."""
        with self._changed:
            seconds, self._seconds = self._seconds, None
            return seconds

    def finish(self, seconds: float) -> None:
        """Wait until nothing is left to send, at most so long; what is on its way then is given up. All ranks call it.

        A last upload that has failed is tried once more. Later checkpoints are not taken.
        """
        if self._rank == 0:
            with self._changed:
                self._last_try = True
                if self._idle() and self._failed is not None:
                    self._waiting = self._failed
                    self._changed.notify_all()
                if not self._idle():
                    get_logger().info("waiting for uploads to %s, at most %.0f s", self._run.url, seconds)
                self._changed.wait_for(lambda: self._idle() or not self._thread.is_alive(), timeout=seconds)
                left = sorted(step for step in (self._waiting, self._current) if step is not None)
            if left:
                get_logger().error(
                    "the upload of step %s to %s has not ended within %.0f s and is given up; it is complete in %s",
                    " and ".join(map(str, left)),
                    self._run.url,
                    seconds,
                    self._folder.path,
                )
            self.abandon()
        else:
            # Rank 0 says when; should its word be late, this rank's transfer ends by its own clock.
            self._thread.join(seconds + MARGIN / 2)
            self.abandon()

    def abandon(self) -> None:
        """Send nothing more, and give up what is on its way."""
        with self._changed:
            self._closing = self._give_up = True
            self._waiting = None
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(MARGIN)

    def _idle(self) -> bool:
        return self._waiting is None and self._current is None

    def _for_ever(self, step: int) -> bool:
        every = self._config.keep_every
        return every is not None and step % every == 0

    def _miss(self, step: int) -> None:
        if self._for_ever(step):
            self._missed.add(step)

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._send(step)
        except (RuntimeError, ValueError) as error:
            # Another rank is gone, and the run is about to fail of it, or this one has left the job already.
            get_logger().debug("uploads have ended: %s", error)
        finally:
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _next(self) -> int | None:
        """The step that all ranks send next; None at the end."""
        order: list[Any] = [None]
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None or bool(self._sendable()))
                if not self._closing:
                    missed = self._sendable()
                    step = self._waiting if self._waiting is not None else max(missed)
                    self._missed.discard(step)
                    order[0] = self._current = step
                    self._waiting = None
        dist.broadcast_object_list(order, src=0, group=self._group)
        return order[0]

    def _sendable(self) -> set[int]:
        # After a failure the next one to go is that of a new checkpoint.
        return set() if self._failed is not None else self._missed

    def _send(self, step: int) -> None:
        began = self._clock()
        path = self._folder.path_of(step)
        problem = self._try(lambda: self._run.upload_shard(step, path, self._rank, self._world, lambda: self._give_up))
        problems: list[str | None] = [problem] * self._world
        dist.all_gather_object(problems, problem, group=self._group)
        if self._rank == 0:
            problem = next((f"rank {rank}: {one}" for rank, one in enumerate(problems) if one is not None), None)
            problem = problem or self._try(lambda: self._run.publish(step, path))
            self._note(step, problem, self._clock() - began)
            if problem is None:
                config = self._config
                left = self._try(lambda: self._run.apply_retention(config.keep, config.keep_every, step))
                if left is not None:
                    get_logger().error("old checkpoints could not be deleted there: %s", left)
            with self._changed:
                self._current = None
                self._changed.notify_all()

    def _note(self, step: int, problem: str | None, seconds: float) -> None:
        """Say how the upload of a step has ended."""
        with self._changed:
            self._failed = None if problem is None else step
            if problem is None:
                self._seconds = seconds
            else:
                self._miss(step)
        if problem is None:
            get_logger().info("uploaded step %d to %s in %.3f s", step, self._run.url, seconds)
        elif not self._give_up:
            get_logger().error(
                "the checkpoint of step %d could not be uploaded; it is complete in %s, and %s: %s",
                step,
                self._folder.path,
                "this was the last try" if self._last_try else "training goes on; the next save tries again",
                problem,
            )

    def _try(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except Exception as error:  # whatever it is, the other ranks wait for a word
            return str(error) if isinstance(error, RemoteError | OSError) else f"{type(error).__name__}: {error}"
        return None


def steps_to_upload(run: RemoteRun, folder: CheckpointFolder, keep_every: int | None) -> list[int]:
    """Steps that are complete here and not there, ascending: the newest, and those that are kept for ever.

    Raises:
        RemoteError: the store cannot be asked.
    """
    here = [step for step in folder.complete_steps() if has_checksums(folder.path_of(step))]
    wanted = [step for step in here if step == here[-1] or (keep_every is not None and step % keep_every == 0)]
    begun = run.listed_steps()
    return [step for step in wanted if step not in begun or not run.has_same(step, folder.path_of(step))]
