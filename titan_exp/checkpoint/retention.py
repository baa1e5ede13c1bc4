"""Retention: which checkpoints stay and which are deleted; and failed saves."""

import os
import shutil
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.checkpoint_files import COMPLETE_NAME, step_name
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.display import format_time
from titan_exp.tracking.run_folder.files import sync_folder

_REPLACED = ".replaced"


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoint folder `checkpoints/` of a run, which need not exist yet."""

    path: Path

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        matches = (COMPLETE_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def newest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None without one, or if the disk cannot be read."""
        try:
            return max(self.complete_steps(), default=None)
        except OSError:
            return None

    def path_of(self, step: int) -> Path:
        """Folder of a complete checkpoint."""
        return self.path / step_name(step)

    def partial_path(self, step: int) -> Path:
        """Folder of a checkpoint while it is written."""
        return self.path / f"{step_name(step)}.partial"

    def keep_file(self, step: int) -> Path:
        """File that keeps a checkpoint while it exists. Whoever needs the checkpoint writes it, and removes it."""
        return self.path / f"{step_name(step)}.keep"

    def publish(self, step: int) -> None:
        """Publish a partial checkpoint by a durable rename."""
        target, partial = self.path_of(step), self.partial_path(step)
        replaced = target.with_name(target.name + _REPLACED)
        sync_folder(partial)
        if target.exists():
            # An earlier attempt's checkpoint is moved away, and restored if this process is killed before the rename.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(partial, target)
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def discard_partial(self, step: int) -> None:
        """Delete the files of a failed save, ignoring errors."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def apply_retention(self, newest: int, every: int | None = None, in_use: Container[int] = ()) -> None:
        """Delete complete checkpoints, oldest first, except the `newest`, multiples of `every`, those in `in_use`, and
        those that have a `keep_file`. Raises the first OSError, after all others are deleted."""
        failure: OSError | None = None
        for step in self.complete_steps()[:-newest]:
            if (every is None or step % every) and step not in in_use and not self.keep_file(step).exists():
                try:
                    self._remove(self.path_of(step))
                except OSError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def quarantine(self, step: int) -> Path:
        """Rename a damaged checkpoint to `step-….damaged`; returns the new path."""
        target = self.path_of(step)
        damaged = target.with_name(target.name + ".damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        os.rename(target, damaged)
        return damaged

    def remove_stale(self) -> None:
        """Delete stale files of interrupted saves and deletions, and restore checkpoints whose replacement failed.
        Files that cannot be deleted, such as another user's, stay, except where a save writes."""
        if not self.path.is_dir():
            return
        for entry in sorted(self.path.iterdir()):
            if not entry.is_dir():
                continue
            if entry.name.endswith(_REPLACED) and not (original := entry.with_suffix("")).exists():
                os.rename(entry, original)
            elif entry.name.endswith((".deleted", _REPLACED)):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.endswith(".partial"):
                deleted = entry.with_name(entry.name + ".deleted")
                os.rename(entry, deleted)
                shutil.rmtree(deleted, ignore_errors=True)

    def _remove(self, target: Path) -> None:
        # Rename first: a partially deleted checkpoint must not look complete.
        deleted = target.with_name(target.name + ".deleted")
        shutil.rmtree(deleted, ignore_errors=True)
        os.rename(target, deleted)
        shutil.rmtree(deleted)


class SaveFailures:
    """Failed saves into a folder. The run fails after `limit_minutes` of them; `clock` is in seconds."""

    def __init__(self, folder: CheckpointFolder, limit_minutes: float | None, clock: Callable[[], float]) -> None:
        self._folder, self._limit_minutes, self._clock = folder, limit_minutes, clock
        self._first = self._last = 0.0
        self._since = ""
        self._cause: str | None = None

    @property
    def warning(self) -> str | None:
        """Warning since when saves fail, and why; None if the last one succeeded."""
        if self._cause is None:
            return None
        problem = f"we cannot write a checkpoint to {self._folder.path} ({self._cause})"
        return f"since {self._since} {problem}, and {self.newest}"

    @property
    def newest(self) -> str:
        """Newest complete checkpoint on the disk."""
        step = self._folder.newest_step()
        return "there is no complete one yet" if step is None else f"the newest complete one is that of step {step}"

    @property
    def retry_due(self) -> bool:
        """True if the limit has passed, so that one more save decides, even if the next regular one is far."""
        return self._cause is not None and self._is_over(self._clock())

    def add(self, cause: str) -> None:
        """Record a failed save."""
        self._last = self._clock()
        if self._cause is None:
            self._first, self._since = self._last, format_time()
        self._cause = cause

    def clear(self) -> None:
        """Record a successful save."""
        self._cause = None

    def require_within_limit(self) -> None:
        """Raise UserError if a save failed after the limit had passed."""
        if self._cause is not None and self._is_over(self._last):
            raise UserError(
                f"Since {self._since} we could not write a checkpoint to {self._folder.path}, which is longer than "
                f"checkpoint.fail_after_minutes={self._limit_minutes:g}: {self._cause}\n"
                f"Of the complete checkpoints, {self.newest}. Free disk space, or make the folder writable. Then "
                f"continue the run: titan-exp retry {self._folder.path.parent}"
            )

    def _is_over(self, now: float) -> bool:
        return self._limit_minutes is not None and now - self._first >= 60 * self._limit_minutes
