"""Folder of a store that a command builds: its lock, space for its arrays, and errors of its disk in words."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from titan_exp.config.errors.explained_errors import REMEDIES
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.data_files import UNFINISHED
from titan_exp.data.token_store.writer import TEMPORARY_SUFFIX


@contextmanager
def store_lock(path: Path, out: str, verb: str) -> Iterator[None]:
    """Hold a store's lock; the operating system releases it when this process exits.

    Raises:
        UserError: another process holds it.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"another titan-exp {verb} is building this store"
            raise refusal(out, reason, "wait for it, or stop it") from None
        yield


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError while writing a store into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk of {folder} is full. Finished shards are kept: free some space and type the "
                "same command to continue, or remove the folder."
            ) from error
        begun = (folder / UNFINISHED).is_dir()
        stays = f" Finished shards are kept in {folder}; type the same command to continue." if begun else ""
        remedy = f" {REMEDIES[error.errno]}." if error.errno in REMEDIES else ""
        reason = error.strerror or error
        raise UserError(f"{error.filename or type(error).__name__}: {reason}.{remedy}{stays}") from error


def remove_temporary_files(*folders: Path) -> None:
    """Remove partial files of killed processes."""
    for folder in folders:
        for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)


def new_array(path: Path, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """New `.npy` file as a memory map, whose space the disk has: writing to a map of a full disk ends the process."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def refusal(out: str, reason: str, remedy: str) -> UserError:
    """Error of a folder in which a store cannot be built."""
    return UserError("The store cannot be built.", [Violation("out", out, reason, remedy)])
