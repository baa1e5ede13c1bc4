"""Checkpoints on disk: `step-00000100/` is complete and durable; anything else is rubble of an interrupted save."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class CheckpointFolder:
    """The `checkpoints/` folder of a run."""

    path: Path
    """Where it is; it need not exist yet."""

    def complete(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        if not self.path.is_dir():
            return []
        found = (_COMPLETE.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def at(self, step: int) -> Path:
        """Folder of the complete checkpoint of a step."""
        return self.path / f"step-{step:08d}"

    def partial(self, step: int) -> Path:
        """Folder in which the checkpoint of a step is being written."""
        return self.path / f"step-{step:08d}.partial"

    def publish(self, step: int) -> None:
        """Turn a written partial checkpoint into a complete one, in one durable move."""
        target = self.at(step)
        if target.exists():
            # The same step of an earlier attempt; both hold the same state, and one of them must give way.
            self._remove(target)
        os.rename(self.partial(step), target)
        _sync_folder(self.path)

    def retain(self, newest: int) -> None:
        """Delete all complete checkpoints but the newest ones."""
        for step in self.complete()[:-newest]:
            self._remove(self.at(step))

    def clean(self) -> None:
        """Delete what interrupted saves and deletions have left."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.is_dir() and entry.name.endswith((".partial", ".deleted")):
                    shutil.rmtree(entry)

    def _remove(self, target: Path) -> None:
        # Renamed first: a checkpoint that is half deleted must not look complete.
        doomed = target.with_name(target.name + ".deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(target, doomed)
        shutil.rmtree(doomed)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
