"""Checkpoints on disk: `step-00000100/` is complete and durable; anything else is rubble of an interrupted save."""

import os
import re
import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from titan_exp.tracking.run_folder.atomic_write import sync_folder

_COMPLETE = re.compile(r"step-(\d{8,})")
_REPLACED = ".replaced"


@dataclass(frozen=True)
class CheckpointFolder:
    """The `checkpoints/` folder of a run."""

    path: Path
    """Where it is; it need not exist yet."""

    def complete_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = (_COMPLETE.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path_of(self, step: int) -> Path:
        """Folder of the complete checkpoint of a step."""
        return self.path / f"step-{step:08d}"

    def partial_path(self, step: int) -> Path:
        """Folder in which the checkpoint of a step is being written."""
        return self.path / f"step-{step:08d}.partial"

    def publish(self, step: int) -> None:
        """Turn a written partial checkpoint into a complete one, in one durable move."""
        target, partial = self.path_of(step), self.partial_path(step)
        replaced = target.with_name(target.name + _REPLACED)
        sync_folder(partial)
        if target.exists():
            # The same step of an earlier attempt gives way, and comes back should this process die in between.
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(partial, target)
        sync_folder(self.path)
        if replaced.exists():
            shutil.rmtree(replaced)

    def discard_partial(self, step: int) -> None:
        """Delete what a failed save has written, as far as that is possible."""
        shutil.rmtree(self.partial_path(step), ignore_errors=True)

    def apply_retention(self, newest: int, every: int | None = None, needed: Container[int] = ()) -> None:
        """Delete complete checkpoints, the oldest first.

        Args:
            newest: how many of the newest stay.
            every: those whose step is a multiple of it stay as well; None keeps none of them.
            needed: steps that stay for now, because something reads them.
        """
        for step in self.complete_steps()[:-newest]:
            if (every is None or step % every) and step not in needed:
                self._remove(self.path_of(step))

    def quarantine(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it no longer counts; returns where it is now."""
        target = self.path_of(step)
        damaged = target.with_name(target.name + ".damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        os.rename(target, damaged)
        return damaged

    def remove_stale(self) -> None:
        """Delete what interrupted saves and deletions have left, and bring back what an interrupted save replaced."""
        if not self.path.is_dir():
            return
        for entry in sorted(self.path.iterdir()):
            if not entry.is_dir():
                continue
            if entry.name.endswith(_REPLACED) and not (original := entry.with_suffix("")).exists():
                os.rename(entry, original)
            elif entry.name.endswith((".partial", ".deleted", _REPLACED)):
                shutil.rmtree(entry)

    def _remove(self, target: Path) -> None:
        # Renamed first: a checkpoint that is half deleted must not look complete.
        doomed = target.with_name(target.name + ".deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(target, doomed)
        shutil.rmtree(doomed)
