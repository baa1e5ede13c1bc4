"""Run lock: prevents concurrent starts of one run."""

import time
from collections.abc import Callable

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.files import FileLock, LockHolder
from titan_exp.tracking.run_folder.run_folder import LockedError, RunFolder

ORPHANS_LIMIT = 15.0
"""Seconds to wait for orphaned ranks to save and stop."""


def acquire_run(folder: RunFolder, role: str, echo: Callable[[str], None]) -> FileLock:
    """Acquire the run lock as `role`, and wait for orphaned ranks of an earlier start. Raises UserError if the run is
    active elsewhere."""
    try:
        lock = folder.claim(role)
    except LockedError as error:
        raise _refusal(folder, error.holder) from None
    try:
        wait_for_orphans(folder, echo)
    except BaseException:
        lock.release()
        raise
    return lock


def wait_for_orphans(folder: RunFolder, echo: Callable[[str], None]) -> None:
    """Wait up to ORPHANS_LIMIT seconds for orphaned ranks of an earlier start. Raises UserError if they remain."""
    if not folder.ranks_alive():
        return
    echo(
        f"Ranks of an earlier start, whose launcher is gone, still run in {folder.path}: waiting up to "
        f"{ORPHANS_LIMIT:.0f} s for them to save and stop."
    )
    deadline = time.monotonic() + ORPHANS_LIMIT
    while folder.ranks_alive():
        if time.monotonic() > deadline:
            raise _refusal(folder, FileLock(folder.ranks_lock).holder())
        time.sleep(0.1)


def _refusal(folder: RunFolder, holder: LockHolder | None) -> UserError:
    beat, state = folder.read_heartbeat(), folder.read_state()
    heartbeat = f"; last heartbeat {beat.age:.0f} s ago, after step {beat.step}" if beat else ""
    attempt = f", attempt {state.attempt}" if state and state.attempt else ""
    return UserError(
        f"{folder.path}: this run is running already ({holder or 'another process'}{attempt}{heartbeat}). "
        "Wait for it, or stop it with Ctrl-C or SIGTERM where it runs. "
        "To run the same beside it, give another experiment.name."
    )
