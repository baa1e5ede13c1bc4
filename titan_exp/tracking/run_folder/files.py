"""Run folder files: written completely or not at all, locked, followed as they grow, temporary."""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import FILE_BYTES, open_file, parse_json, read_file

_counter = itertools.count()


def write_atomically(path: str | Path, text: str, *, durable: bool = True) -> None:
    """Replace the file at `path` atomically: readers and crashes see the old or the new content. Bytes decoded with
    `surrogateescape` are written unchanged. Without `durable` there is no fsync: a power failure may lose the newest
    writes. The temporary file is removed after an error."""
    path = Path(path)
    # Unique on this machine, even if a signal handler interrupts a write of the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def overwrite(path: Path, text: str) -> None:
    """Overwrite a file in place by one write, padded with blanks to its size, which needs no disk space."""
    with path.open("r+b", buffering=0) as file:
        file.write(text.removesuffix("\n").encode().ljust(path.stat().st_size - 1) + b"\n")


def mkdir_below(root: Path, path: Path, mode: int = 0o777) -> None:
    """Create `path` below `root`, but never `root` itself, which may be a deleted run folder. Raises OSError."""
    for name in path.relative_to(root).parts:
        root = root / name
        root.mkdir(mode, exist_ok=True)


def sync_all(folder: Path) -> None:
    """Fsync a folder and every file in it, after several writes with `durable=False`."""
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    """Fsync a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Fsync the directory entries of `folder`; ignored on file systems that do not support it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems do not support it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_until(happened: Callable[[], object], seconds: float) -> bool:
    """Poll until something has happened, such as a file of another process; False if it has not in so many seconds."""
    deadline = time.monotonic() + seconds
    while not (has_happened := bool(happened())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return has_happened


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a lock, as recorded in the lock file."""

    role: str  # role, such as `launcher`, `rank 0` or `submission`
    pid: int
    host: str
    since: float  # Unix time of the acquisition

    def __str__(self) -> str:
        return f"{self.role}, process {self.pid} on {self.host}"


class LockedError(Exception):
    """Another process holds the lock."""

    def __init__(self, path: Path, holder: LockHolder | None) -> None:
        self.holder = holder
        super().__init__(f"{holder or 'another process'} holds {path}")


class FileLock:
    """flock on a file that is never removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor is not None

    def fileno(self) -> int:
        """Descriptor of the held lock. A process that inherits it holds the lock, too, also after `release` here."""
        assert self._descriptor is not None
        return self._descriptor

    def acquire(self, role: str | None = None, *, shared: bool = False, timeout: float = 0.0) -> None:
        """Acquire the lock, exclusive or shared, within `timeout` seconds; `role` records this process for `holder`.
        Raises LockedError if another process holds it, UserError if the file system does not support locks."""
        assert not self.held
        descriptor = self._open(query=role is None)
        try:
            self._wait(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout)
            if role is not None:
                _record(descriptor, role)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def rename(self, role: str) -> None:
        """Record this process, which holds the lock, under another role."""
        assert self._descriptor is not None
        _record(self._descriptor, role)

    def release(self) -> None:
        """Release the lock, if held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> LockHolder | None:
        """Process that last recorded itself; None if the record is missing or incomplete."""
        try:
            return parse_json(read_file(self.path), LockHolder)
        except (OSError, ValueError, UserError):
            return None

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open(self, *, query: bool) -> int:
        misplaced = f"{self.path} is not a file, and a lock file belongs there. Move it away."
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
                raise UserError(misplaced) from error
            if not query or error.errno not in (errno.EROFS, errno.EACCES):
                raise
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # another user's, or on a read-only disk
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(misplaced)
        return descriptor

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


def _record(descriptor: int, role: str) -> None:
    text = json.dumps(asdict(LockHolder(role, os.getpid(), socket.gethostname(), time.time()))).encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


def is_held(path: Path, *, shared: bool = False) -> bool:
    """True if a process holds the lock at `path` exclusively; with `shared`, in any mode."""
    if not path.exists():
        return False
    with suppress(LockedError), FileLock(path) as lock:
        lock.acquire(shared=not shared)
        return False
    return True


PREFIX = "titan_exp_run-"
LOCK = ".lock"
SOCKET_ROOM = 45
"""Number of characters for socket names in the folder (multiprocessing, wandb); a socket path has at most 107."""


def create_temporary_folder() -> tuple[Path, FileLock]:
    """Create a folder and hold its lock; `release` and remove it at the end."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = hold_temporary_folder(path)
        if lock is not None:  # otherwise a starting process has just removed it
            return path, lock


def hold_temporary_folder(path: Path) -> FileLock | None:
    """Hold the folder of another process; None if it has been removed."""
    lock = FileLock(path / LOCK)
    try:
        lock.acquire(shared=True)
    except (LockedError, FileNotFoundError):
        return None
    except UserError:
        return lock  # without file locks, it is never removed as stale
    if not lock.path.exists():
        lock.release()
        return None
    return lock


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a folder that is removed after the block; if this process is killed, the next start removes it."""
    path, lock = create_temporary_folder()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def redirect_temporary_files(path: Path) -> dict[str, str]:
    """Environment variables that send the temporary files of processes (wandb, multiprocessing) into the folder. Empty
    if the names of sockets would be too long."""
    return {"TMPDIR": str(path)} if len(os.fsencode(path)) + SOCKET_ROOM <= 107 else {}


def remove_stale_temporary_folders() -> None:
    """Remove this user's folders that no process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, LockedError, UserError), FileLock(path / LOCK) as lock:
            status = path.lstat()
            if status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode):
                lock.acquire()
                shutil.rmtree(path, ignore_errors=True)


_COLOUR = re.compile("\x1b\\[[0-9;]*m")
LAST_BYTES = 2**18  # number of bytes that are searched for the last lines of a log


class FileTail:
    """Lines appended to a file; `from_now` skips those that it has, and `most` all but that many bytes."""

    def __init__(self, path: Path, *, from_now: bool = False, most: int | None = None) -> None:
        self._path, self._offset = path, 0
        if most is not None:
            with suppress(FileNotFoundError), open_file(path) as file:
                self._offset = max(0, file.seek(0, os.SEEK_END) - most)
        if from_now:
            # A torn last line will be truncated and overwritten.
            with suppress(FileNotFoundError), open_file(path) as file:
                begin = max(0, file.seek(0, os.SEEK_END) - FILE_BYTES)
                file.seek(begin)
                self._offset = begin + file.read().rfind(b"\n") + 1

    @property
    def skipped(self) -> int:
        """Bytes before the next line."""
        return self._offset

    def lines(self, *, torn: bool = False) -> Iterator[str]:
        """Complete lines since the last call, and with `torn` an incomplete one. Raises UserError if it is no file."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:
            return
        with file:
            while True:
                file.seek(self._offset)
                text = file.read(FILE_BYTES)
                end = text.rfind(b"\n") + 1
                if not end and (torn or len(text) == FILE_BYTES):
                    end = len(text)
                if not end:
                    return
                self._offset += end
                yield from _text(text[:end]).splitlines()


def last_lines(log: Path, most: int) -> list[str]:
    """Last lines of a log; none if it is missing or cannot be read."""
    try:
        with open_file(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return _text(file.read()).splitlines()[-most:]
    except (OSError, UserError):
        return []


def _text(log: bytes) -> str:
    """Text of a log, without the colours that other libraries may add."""
    return _COLOUR.sub("", log.decode(errors="replace"))
