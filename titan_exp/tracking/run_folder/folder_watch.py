"""Detection of a run folder that is deleted or moved while its processes run."""

import os
import time
from collections.abc import Callable
from pathlib import Path

CONFIRM_SECONDS = 1.0
"""Seconds for which the folder must be missing: network disks may show a rename late."""


class FolderWatch:
    """Watches the run folder at `path` through an open descriptor, which follows it after a move.

    A poll costs three system calls. `clock` is in seconds. Raises OSError if the folder is missing already.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._missing_since: float | None = None

    def loss(self) -> str | None:
        """Message once the folder is lost, with the command that continues the run; None while it is there."""
        if self._is_there():
            self._missing_since = None
            return None
        now = self._clock()
        if self._missing_since is None:
            self._missing_since = now
        return self._describe() if now - self._missing_since >= CONFIRM_SECONDS else None

    def confirmed_loss(self) -> str | None:
        """Message if the folder is lost, after a wait of at most CONFIRM_SECONDS if it is missing now."""
        while (message := self.loss()) is None and self._missing_since is not None:
            time.sleep(CONFIRM_SECONDS / 10)
        return message

    def holds(self, path: Path) -> bool:
        """True if the folder at `path` is the watched one, and no other run that was begun at its path meanwhile."""
        try:
            return self._is_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # unknown: the disk does not respond

    def moved_to(self) -> Path | None:
        """Path of the folder after a move; None if it was not moved or deleted."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            moved = path != Path(os.path.realpath(self._path)) and self._is_folder(path)
        except OSError:
            return None
        return path if moved else None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def _is_there(self) -> bool:
        try:
            return self.holds(self._path) and (self._path / "config.yaml").exists()
        except OSError:
            return True  # unknown, as in `holds`

    def _is_folder(self, path: Path) -> bool:
        # The open descriptor keeps the inode number from being used again.
        return os.path.samestat(os.stat(path), os.fstat(self._descriptor))

    def _describe(self) -> str:
        moved = self.moved_to()
        if moved is not None:
            return (
                f"the run folder {self._path} was moved to {moved}, and the run is stopped. It continues from its "
                f"newest checkpoint with `titan-exp retry {moved}`"
            )
        if self._path.exists() and not (self._path / "config.yaml").exists():
            return (
                f"config.yaml was deleted from the run folder {self._path}, and the run is stopped. Remove the rest of "
                "the folder; then the same command starts the run from the beginning"
            )
        return (
            f"the run folder {self._path} was deleted, and the run is stopped; nothing more is written. The same "
            "command starts it from the beginning"
        )
