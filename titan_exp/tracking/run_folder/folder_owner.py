"""Owners of folders: users who could replace what a run executes, by renaming a folder or writing into it."""

import contextlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from titan_exp.config.errors.user_error import UserError


def own_folder(path: Path) -> Path:
    """Create a folder that only this user writes to, or take an existing one; returns it. Raises UserError if another
    user owns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o755)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _is_mine(status.st_uid, path.parent):
        raise UserError(
            f"{path} belongs to {_name(status.st_uid)}, whose code would run as you. Have it removed, or choose a "
            "folder of your own: paths.runs=~/runs"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    return path


def refuse_foreign_folders(runs: Path, run: Path) -> None:
    """Raise UserError if a user outside the group that shares the folder of runs could replace the files of a run.

    `run` need not exist yet. A folder of runs is shared by the group that may write to it, unless anyone may.
    """
    shared = runs.stat()
    for path in (runs, run.parent, run):
        if not path.exists():
            continue
        for status in (path.lstat(), path.stat()):  # who owns a link may point it elsewhere
            if not _is_trusted(status.st_uid, shared, path):
                raise UserError(
                    f"{path} belongs to {_name(status.st_uid)}, who could replace what your run executes. "
                    f"{_elsewhere(runs, path, run)}."
                )
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            change = f"Type `chmod {'+t' if path == runs else 'o-w'} {path}`"
            mine = os.geteuid() in (0, path.stat().st_uid)
            raise UserError(
                f"{path}: any user of this machine may write to it, and so replace what your run executes. "
                f"{change if mine else _elsewhere(runs, path, run)}."
            )


def _elsewhere(runs: Path, path: Path, run: Path) -> str:
    if path == runs:
        return "Choose a folder of your own, or one that your group alone may write to: paths.runs=~/runs"
    return f"Choose another name: experiment.name={run.parent.name}-{_name(os.geteuid())}"


def _is_trusted(owner: int, shared: os.stat_result, path: Path) -> bool:
    """True for this user, root, and those who share the folder of runs by its group.

    For root in a container, owners that the container does not know are outside it.
    """
    if owner == 0 or (os.geteuid() == 0 and _name(owner) == str(owner)):
        return True
    by_group = shared.st_mode & (stat.S_IWGRP | stat.S_IWOTH) == stat.S_IWGRP
    if by_group and (owner == shared.st_uid or _is_member(owner, shared.st_gid)):
        return True
    return _is_mine(owner, path if path.is_dir() else path.parent)


def _is_mine(owner: int, folder: Path) -> bool:
    """True if the file system of `folder` names this user `owner`, which need not be its id here."""
    if owner == os.geteuid():
        return True
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".owner-", dir=folder) as probe:
        return os.stat(probe).st_uid == owner
    return False


def _is_member(user: int, group: int) -> bool:
    """True if a user is in a group, or unknown here: a container knows no members, who alone can have written there."""
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        return True
    return group in os.getgrouplist(entry.pw_name, entry.pw_gid)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
