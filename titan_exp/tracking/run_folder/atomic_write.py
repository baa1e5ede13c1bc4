"""Files that are whole or absent: written to a temporary name beside the target, then renamed over it."""

import itertools
import os
from pathlib import Path

_serial = itertools.count()


def write_atomically(path: str | Path, text: str, *, durable: bool = True) -> None:
    """Replace the file at `path` by `text`, so that a reader and a death at any instant see the old or the new file.

    Args:
        path: file to write; its folder exists.
        text: the whole content; bytes that were read with `surrogateescape` are written as they were.
        durable: wait until the disk has it; without, a power cut may lose the newest write but never mixes two.

    Raises:
        OSError: the disk is full or the folder cannot be written to; the temporary file is gone then.
    """
    path = Path(path)
    # Unique within the machine even when a signal handler interrupts a write of the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.tmp")
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


def sync_all(folder: Path) -> None:
    """Wait until the disk has every file in `folder`, and their names: one wait for what was written without."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in `folder`; file systems that cannot do that are let be."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to sync a folder, and then rename is all there is
    finally:
        os.close(descriptor)
