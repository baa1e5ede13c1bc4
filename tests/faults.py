"""Real faults of the machine: small disks that fill up, and folders that nobody may write to, root neither."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NO_MOUNTS = "this machine lets nobody mount (no root, or a container without CAP_SYS_ADMIN)"


@cache
def can_mount() -> bool:
    """Whether file systems can be mounted here, in a mount namespace of one's own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes at `path`, which is made."""
    path.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    try:
        yield path
    finally:
        _run("umount", "--lazy", str(path))


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """The folder at `path`, on which nothing can be changed meanwhile."""
    _run("mount", "--bind", str(path), str(path))
    try:
        _run("mount", "-o", "remount,bind,ro", str(path))
        yield path
    finally:
        _run("umount", "--lazy", str(path))


def fill(path: Path, *, leave: int = 0) -> Path:
    """Fill the disk at `path` up to so many bytes; returns the file that does."""
    file = path / "filler"
    size = max(0, shutil.disk_usage(path).free - leave)
    with file.open("wb") as stream:
        stream.write(b"\0" * size)
    return file


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
