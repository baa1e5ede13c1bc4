"""Background upload: each rank's thread uploads its shards, and rank 0 writes the completion marker last.

Training never waits for uploads, except for a bounded time in `finish`.
"""

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_exp.checkpoint.remote_folder import RemoteError, RemoteFolder
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_writer import has_checksums
from titan_exp.config.checkpoint_files import (
    CHECKSUMS_FILE,
    COMPLETE_NAME,
    METADATA_FILE,
    FileChecksum,
    joined,
    parse_checksums,
    step_name,
)
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import CheckpointConfig
from titan_exp.config.schema.foreign_code import SIGNATURE_FILE
from titan_exp.parallel.mesh import from_rank_0, gather_objects
from titan_exp.tracking.display import format_time
from titan_exp.tracking.logging import get_logger

CONFIG = "config.yaml"  # configuration file of the run, next to its checkpoints
DAMAGED = "checksums.damaged.json"  # name of `checksums.json` in a quarantined checkpoint
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class RemoteRun:
    """Remote folder of a run below `remote` (`checkpoint.remote`). Raises UserError if the URL is not usable."""

    def __init__(self, remote: str, name: str, run_id: str) -> None:
        self.folder = RemoteFolder(joined(remote, name, run_id))
        """Folder with the configuration and the checkpoints."""
        self.url = self.folder.url
        self._kept: set[int] = set()

    @classmethod
    def of(cls, remote: str | None, name: str, run_id: str) -> "RemoteRun | None":
        """Remote folder of a run; None if its checkpoints stay on this machine."""
        return None if remote is None else cls(remote, name, run_id)

    def write_config(self, config: Path) -> None:
        """Upload the run's configuration and its signature; this also verifies that the store is writable."""
        for path in (config.with_name(SIGNATURE_FILE), config):
            text = path.read_bytes() if path.is_file() else b""
            if self.folder.read(path.name) != text:
                self.folder.write(path.name, text)

    def listed_steps(self) -> list[int]:
        """Steps with any file, ascending, complete or not."""
        matches = (COMPLETE_NAME.fullmatch(name) for name in self.folder.listing().folders)
        return sorted(int(match[1]) for match in matches if match)

    def checksums(self, step: int) -> dict[str, FileChecksum] | None:
        """Checksums of a complete checkpoint by file name; None if it is incomplete."""
        text = self._marker(step)
        try:
            checksums = parse_checksums(text or b"")
        except UserError:
            return None  # a partial or foreign file does not complete a checkpoint
        # Names with path components could be written outside the checkpoint.
        safe = METADATA_FILE in checksums and all(Path(name).name == name for name in checksums)
        return checksums if safe else None

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending; one request per listed step."""
        return [step for step in self.listed_steps() if self.checksums(step) is not None]

    def has_same(self, step: int, path: Path) -> bool:
        """True if the checkpoint at `path` is already uploaded, complete and identical."""
        return self._marker(step) == (path / CHECKSUMS_FILE).read_bytes()

    def upload_shard(self, step: int, path: Path, rank: int, world: int, stop: Callable[[], bool]) -> None:
        """Upload one rank's share of a checkpoint's files: its own files, if the layout is unchanged. The first file
        invalidates an existing checkpoint of the step. Raises RemoteError if an upload fails, OSError if the checkpoint
        at `path` cannot be read."""
        listed = self.folder.listing(step_name(step)).files
        if CHECKSUMS_FILE in listed and self.has_same(step, path):
            return
        self.folder.remove(*(f"{step_name(step)}/{name}" for name in (CHECKSUMS_FILE, DAMAGED) if name in listed))
        for name in parse_checksums((path / CHECKSUMS_FILE).read_text(encoding="utf-8")):
            # A file's writer, modulo the world size; rank 0 for files without a rank.
            match = _RANK_FILE.fullmatch(name)
            if rank == (int(match[1]) % world if match else 0):
                self.folder.upload(path / name, f"{step_name(step)}/{name}", stop=stop)

    def publish(self, step: int, path: Path) -> None:
        """Write the marker file once all shards are there. Raises RemoteError if one is missing or cut off."""
        text = (path / CHECKSUMS_FILE).read_text(encoding="utf-8")
        listed = self.folder.listing(step_name(step)).files
        if CHECKSUMS_FILE in listed:
            return  # complete and identical: no rank has uploaded anything
        for name, checksum in parse_checksums(text).items():
            if name not in listed or listed[name].size != checksum.size:
                size = f"{listed[name].size:,} bytes" if name in listed else "nothing"
                file = joined(self.url, step_name(step), name)
                raise RemoteError(f"{file}: {size} of {checksum.size:,} bytes arrived")
        self.folder.write(f"{step_name(step)}/{CHECKSUMS_FILE}", text.encode())

    def apply_retention(self, newest: int, every: int | None, published: int) -> None:
        """Delete old complete checkpoints and files of interrupted uploads, up to the step just published. The `newest`
        checkpoints and multiples of `every` are kept."""
        listed = [step for step in self.listed_steps() if step <= published]
        complete = [step for step in listed if step in self._kept or self.checksums(step) is not None]
        self._kept = set()
        for step in listed:
            if step not in complete:
                if DAMAGED not in self.folder.listing(step_name(step)).files:
                    self.folder.remove_folder(step_name(step))
            elif step not in complete[-newest:] and (every is None or step % every):
                # Delete the marker first: a partially deleted checkpoint must not look complete.
                self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
                self.folder.remove_folder(step_name(step))
            else:
                self._kept.add(step)

    def quarantine(self, step: int) -> None:
        """Rename the marker file of a damaged checkpoint; its other files are kept."""
        try:
            self.folder.write(f"{step_name(step)}/{DAMAGED}", self._marker(step) or b"")
            self.folder.remove(f"{step_name(step)}/{CHECKSUMS_FILE}")
        except RemoteError as error:
            get_logger().error("could not quarantine the damaged checkpoint of step %d: %s", step, error)

    def _marker(self, step: int) -> bytes | None:
        return self.folder.read(f"{step_name(step)}/{CHECKSUMS_FILE}")


STOP_SECONDS = 60.0  # maximum wait for uploads after a stop request; the allocation may be about to end
MARGIN = 20.0  # seconds allowed for a cancelled transfer to end, and for the ranks to leave their group


class BackgroundUploader:
    """Uploads the checkpoints of a run, one at a time. The constructor is collective over all ranks. Rank 0 chooses the
    newest durable checkpoint next. A checkpoint superseded before its upload began is skipped; checkpoints retained by
    `keep_every` and failed ones are uploaded when nothing newer waits."""

    def __init__(
        self,
        run: RemoteRun,
        folder: CheckpointFolder,
        config: CheckpointConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._folder, self._config, self._clock = run, folder, config, clock
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # Separate group, whose ranks wait while there is nothing to upload.
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._current: int | None = None
        self._skipped: set[int] = set()
        self._closing = self._cancelled = self._last_try = False
        self._failed: int | None = None
        self._failing_since: str | None = None
        self.warning: str | None = None
        """Warning since when uploads fail, and why; None if the last one succeeded."""
        self._seconds: float | None = None
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)

    def start(self, steps: list[int]) -> None:
        """Start with local checkpoints not yet uploaded, ascending; collective, with rank 0's list. Idempotent."""
        if self._thread.ident is not None:
            return
        self._skipped = set(steps[:-1])
        self._waiting = steps[-1] if steps else None
        self._thread.start()

    def offer(self, step: int) -> None:
        """Enqueue a durable checkpoint (rank 0) without blocking."""
        with self._changed:
            if self._waiting is not None:
                text = "uploads are slower than saves: we skip the checkpoint of step %d for that of step %d, and %s"
                never = f"do not upload it to {self._run.url}"
                then = "upload it later" if self._is_retained(self._waiting) else never
                get_logger().warning(text, self._waiting, step, then)
                self._skip(self._waiting)
            self._waiting = step
            self._changed.notify_all()

    def steps_in_use(self) -> set[int]:
        """Steps protected from retention (rank 0)."""
        with self._changed:
            return {step for step in (self._waiting, self._current) if step is not None}

    def pop_seconds(self) -> float | None:
        """Duration of the last successful upload since the last call; None if there was none."""
        with self._changed:
            seconds, self._seconds = self._seconds, None
            return seconds

    def finish(self, seconds: float) -> None:
        """Wait for all uploads, at most `seconds`, then cancel the rest. Collective over all ranks. A failed last
        upload is retried once. Later checkpoints are not accepted."""
        if self._rank == 0:
            with self._changed:
                self._last_try = True
                if self._is_idle() and self._failed is not None:
                    self._waiting = self._failed
                    self._changed.notify_all()
                if not self._is_idle():
                    get_logger().info("waiting for uploads to %s, at most %.0f s", self._run.url, seconds)
                self._changed.wait_for(lambda: self._is_idle() or not self._thread.is_alive(), timeout=seconds)
                left = sorted(step for step in (self._waiting, self._current) if step is not None)
            if left:
                text = "the upload of step %s to %s did not end within %.0f s, so we cancel it. %s %s"
                steps, local = " and ".join(map(str, left)), "The checkpoint is complete in"
                get_logger().error(text, steps, self._run.url, seconds, local, self._folder.path)
        else:
            # Rank 0 ends the queue; if it is late, this rank cancels by its local clock.
            self._thread.join(seconds + MARGIN / 2)
        self.cancel()

    def cancel(self) -> None:
        """Cancel the current upload and drop the queue."""
        with self._changed:
            self._closing = self._cancelled = True
            self._waiting = None
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(MARGIN)

    def _is_idle(self) -> bool:
        return self._waiting is None and self._current is None

    def _is_retained(self, step: int) -> bool:
        every = self._config.keep_every
        return every is not None and step % every == 0

    def _skip(self, step: int) -> None:
        if self._is_retained(step):
            self._skipped.add(step)

    def _work(self) -> None:
        try:
            while (step := self._next()) is not None:
                self._upload(step)
        except (RuntimeError, ValueError) as error:
            # Either another rank has exited and the run is about to fail, or this rank has left the process group.
            get_logger().debug("uploads have ended: %s", error)
        finally:
            self._finish_current()

    def _next(self) -> int | None:
        chosen = None
        if self._rank == 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None or bool(self._retriable()))
                if not self._closing:
                    chosen = self._waiting if self._waiting is not None else max(self._retriable())
                    self._skipped.discard(chosen)
                    self._current, self._waiting = chosen, None
        return from_rank_0(chosen, self._group)

    def _retriable(self) -> set[int]:
        # After a failure, the next upload is a new checkpoint.
        return set() if self._failed is not None else self._skipped

    def _upload(self, step: int) -> None:
        began = self._clock()
        path = self._folder.path_of(step)
        stop = lambda: self._cancelled  # noqa: E731
        failure = _failure_of(lambda: self._run.upload_shard(step, path, self._rank, self._world, stop))
        failures = gather_objects(failure, self._group)
        if self._rank != 0:
            return
        failure = next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None), None)
        failure = failure or _failure_of(lambda: self._run.publish(step, path))
        self._record(step, failure, self._clock() - began)
        if failure is None:
            keep, keep_every = self._config.keep, self._config.keep_every
            failure = _failure_of(lambda: self._run.apply_retention(keep, keep_every, step))
            if failure is not None:
                get_logger().error("could not delete old remote checkpoints: %s", failure)
        self._finish_current()

    def _finish_current(self) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()

    def _record(self, step: int, failure: str | None, seconds: float) -> None:
        with self._changed:
            self._failed = None if failure is None else step
            if failure is None:
                self.warning = self._failing_since = None
                self._seconds = seconds
            else:
                self._skip(step)
                since = self._failing_since = self._failing_since or format_time()
                self.warning = f"since {since} no upload to {self._run.url} succeeds ({failure})"
        if failure is None:
            get_logger().info("uploaded step %d to %s in %.3f s", step, self._run.url, seconds)
        elif not self._cancelled:
            text = "could not upload the checkpoint of step %d. It is complete in %s, and %s: %s"
            then = "this was the last attempt" if self._last_try else "the next save tries again"
            get_logger().error(text, step, self._folder.path, then, failure)


def _failure_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:  # any error: the other ranks wait for a result
        return str(error) if isinstance(error, RemoteError | OSError) else f"{type(error).__name__}: {error}"
    return None


def steps_to_upload(run: RemoteRun, folder: CheckpointFolder, keep_every: int | None) -> list[int]:
    """Local complete steps to upload, ascending: the newest, and steps retained by `keep_every`. Raises RemoteError."""
    local = [step for step in folder.complete_steps() if has_checksums(folder.path_of(step))]
    wanted = [step for step in local if step == local[-1] or (keep_every is not None and step % keep_every == 0)]
    listed = run.listed_steps()
    return [step for step in wanted if step not in listed or not run.has_same(step, folder.path_of(step))]
