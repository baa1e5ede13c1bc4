"""Atomic file writes: a temporary file beside the target, fsync, rename."""

import contextlib
import itertools
import os
from pathlib import Path

_counter = itertools.count()


def write_atomically(path: str | Path, text: str, *, durable: bool = True) -> None:
    """Replace the file at `path` atomically: readers and crashes see the old or the new content.

    Bytes decoded with `surrogateescape` are written unchanged. Without `durable` there is no fsync: a power failure may
    lose the newest writes. The temporary file is removed after an error.
    """
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
    """Overwrite a file by one write in place, padded with blanks to its size, which needs no space on the disk."""
    with path.open("r+b", buffering=0) as file:
        file.write(text.removesuffix("\n").encode().ljust(path.stat().st_size - 1) + b"\n")


def mkdir_below(root: Path, path: Path, mode: int = 0o777) -> None:
    """Create the folder `path` below `root`, but never `root`, such as a deleted run folder. Raises OSError."""
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
        with contextlib.suppress(OSError):  # some network file systems do not support it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
