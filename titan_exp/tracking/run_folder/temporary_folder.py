"""Temporary folder of running processes, which the next start removes after they are killed.

Every process that uses it holds a shared lock, which the kernel releases at process exit; unlike a process id, it is
also valid across containers.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.file_lock import FileLock, LockedError

PREFIX = "titan_exp_run-"
LOCK = ".lock"
SOCKET_ROOM = 45
"""Characters of socket names in the folder (multiprocessing, wandb); a socket path has at most 107."""


def create_temporary_folder() -> tuple[Path, FileLock]:
    """Create a folder and hold its lock; `release` and remove it at the end."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = hold_temporary_folder(path)
        if lock is not None:  # else a starting process has just removed it
            return path, lock


def hold_temporary_folder(path: Path) -> FileLock | None:
    """Hold the folder of another process; None if it has been removed."""
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(shared=True)
    except (LockedError, FileNotFoundError):
        return None
    except UserError:
        return lock  # no file locks here: it is never removed as stale
    if not lock.path.exists():
        lock.release()
        return None
    return lock


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed after the block, or by the next start if this process is killed."""
    path, lock = create_temporary_folder()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def redirect_temporary_files(path: Path) -> dict[str, str]:
    """Environment variables that send the temporary files of processes (wandb, multiprocessing) into the folder.

    Empty if the names of sockets would be too long.
    """
    return {"TMPDIR": str(path)} if len(os.fsencode(path)) + SOCKET_ROOM <= 107 else {}


def remove_stale_temporary_folders() -> None:
    """Remove this user's folders that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, LockedError, UserError), FileLock(path / LOCK) as lock:
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
                lock.acquire()
                shutil.rmtree(path, ignore_errors=True)
