"""Advisory file locks (flock), which the kernel releases at process exit."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import parse_json, read_file


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a lock, as recorded in the lock file."""

    role: str
    """Role, such as `launcher`, `rank 0` or `submission`."""
    pid: int
    host: str
    since: float
    """Unix time of the acquisition."""

    def __str__(self) -> str:
        return f"{self.role}, process {self.pid} on {self.host}"


class LockedError(Exception):
    """Another process holds the lock."""

    def __init__(self, path: Path, holder: LockHolder | None) -> None:
        self.holder = holder
        super().__init__(f"{path} is held by {holder or 'another process'}")


class FileLock:
    """flock on a file that is never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def acquire(self, role: str | None = None, *, shared: bool = False, timeout: float = 0.0) -> None:
        """Acquire the lock, exclusive or shared, within `timeout` seconds; `role` records this process for `holder`.

        Raises LockedError if another process holds it, UserError if the file system does not support locks.
        """
        assert not self.held
        descriptor = self._open(query=role is None)
        try:
            self._wait(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout)
            if role is not None:
                holder = LockHolder(role, os.getpid(), socket.gethostname(), time.time())
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> LockHolder | None:
        """Last recorded process; None if missing or incomplete."""
        try:
            return parse_json(read_file(self.path), LockHolder)
        except (OSError, ValueError, UserError):
            return None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open(self, *, query: bool) -> int:
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise self._misplaced() from error
            if not query or error.errno not in (errno.EROFS, errno.EACCES):
                raise
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # of another user, or on a read-only disk
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._misplaced()
        return descriptor

    def _misplaced(self) -> UserError:
        return UserError(f"{self.path} is no file, where that of a lock belongs. Move it away.")

    def _wait(self, descriptor: int, kind: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockedError(self.path, self.holder()) from None
            except OSError as error:
                raise UserError(
                    f"{self.path}: this file system has no file locks ({error.strerror}), without which two runs could "
                    "write into one folder. Set paths.runs to a folder on a file system with locks."
                ) from error
            time.sleep(0.02)


def is_held(path: Path, *, shared: bool = False) -> bool:
    """True if a process holds the lock at `path` exclusively, or with `shared` in any mode."""
    if not path.exists():
        return False
    with contextlib.suppress(LockedError), FileLock(path) as lock:
        lock.acquire(shared=not shared)
        return False
    return True
