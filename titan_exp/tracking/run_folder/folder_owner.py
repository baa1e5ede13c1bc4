"""Folder owners: users who could replace code that a run executes, by renaming a folder or writing into it."""

import contextlib
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from titan_exp.config.errors.user_error import UserError


def own_folder(path: Path) -> Path:
    """Create or reuse a folder that only this user can write to. Raises UserError if another user owns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o755)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _is_mine(status.st_uid, path.parent):
        remedy = "Ask them to remove it, or choose a folder of your own: paths.runs=~/runs"
        raise UserError(f"{path} belongs to {_name(status.st_uid)}, whose code would run as you. {remedy}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return path


def refuse_foreign_folders(runs: Path, run: Path) -> None:
    """Raise UserError if a user outside the group that shares the folder of runs could replace the files of a run.
    `run` need not exist yet. A folder of runs is shared by the group that may write to it, unless anyone may."""
    shared = runs.stat()
    for path in (runs, run.parent, run):
        if not path.exists():
            continue
        for status in (path.lstat(), path.stat()):  # the owner of a link may point it elsewhere
            if not _is_trusted(status.st_uid, shared, path):
                owner = f"{path} belongs to {_name(status.st_uid)}"
                raise UserError(f"{owner}, who could replace what your run executes. {_elsewhere(runs, path, run)}.")
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            change = f"Type `chmod {'+t' if path == runs else 'o-w'} {path}`"
            mine = os.geteuid() in (0, path.stat().st_uid)
            remedy = change if mine else _elsewhere(runs, path, run)
            reason = "any user of this machine may write to it, and so replace what your run executes"
            raise UserError(f"{path}: {reason}. {remedy}.")


def _elsewhere(runs: Path, path: Path, run: Path) -> str:
    if path == runs:
        return "Choose a folder of your own, or one that your group alone may write to: paths.runs=~/runs"
    return f"Choose another name: experiment.name={run.parent.name}-{_name(os.geteuid())}"


def _is_trusted(owner: int, shared: os.stat_result, path: Path) -> bool:
    """True for this user, for root, and for users who share the folder of runs through its group. For root in a
    container, owners that the container does not know count as outsiders."""
    if owner == 0 or (os.geteuid() == 0 and _name(owner) == str(owner)):
        return True
    by_group = shared.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    if by_group and owner == shared.st_uid:
        return True
    if by_group:
        try:
            entry = pwd.getpwuid(owner)
        except KeyError:
            return True  # a container knows no members, and only members can have written there
        if shared.st_gid in os.getgrouplist(entry.pw_name, entry.pw_gid):
            return True
    return _is_mine(owner, path if path.is_dir() else path.parent)


def _is_mine(owner: int, folder: Path) -> bool:
    """True if the file system of `folder` means this user by `owner`, which need not be this user's id here."""
    if owner == os.geteuid():
        return True
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".owner-", dir=folder) as probe:
        return os.stat(probe).st_uid == owner
    return False


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


CONFIRM_SECONDS = 1.0  # seconds for which the folder must be missing, because network disks may show a rename late


class FolderWatch:
    """Watches the run folder at `path` through an open descriptor, which follows it after a move. A poll costs three
    system calls. `clock` is in seconds. Raises OSError if the folder is missing already."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._missing_since: float | None = None

    def loss(self) -> str | None:
        """Message once the folder is lost, with the command that continues the run; None while it exists."""
        try:
            there = self.holds(self._path) and (self._path / "config.yaml").exists()
        except OSError:
            there = True  # the disk does not respond, as in `holds`
        if there:
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
        """True if the folder at `path` is the watched one, rather than that of another run begun at its path."""
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

    def _is_folder(self, path: Path) -> bool:
        # The open descriptor keeps the inode number from being used again.
        return os.path.samestat(os.stat(path), os.fstat(self._descriptor))

    def _describe(self) -> str:
        moved, stopped = self.moved_to(), "so the run has stopped"
        if moved is not None:
            remedy = f"To continue from its newest checkpoint, type titan-exp retry {moved}"
            return f"somebody moved the run folder {self._path} to {moved}, {stopped}. {remedy}"
        if self._path.exists() and not (self._path / "config.yaml").exists():
            remedy = "Remove the rest of the folder, and the same command starts the run from the beginning"
            return f"somebody deleted config.yaml from the run folder {self._path}, {stopped}. {remedy}"
        remedy = "The same command starts it from the beginning"
        return f"somebody deleted the run folder {self._path}, {stopped} and writes nothing more. {remedy}"
