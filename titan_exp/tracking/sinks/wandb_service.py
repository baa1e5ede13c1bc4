"""Bounded shutdown of wandb's service process, for which wandb's exit handler would wait without limit."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

SECONDS = 15.0
"""Time for the service to send the rest of its data after every run has been finished."""


def stop_wandb_service(seconds: float = SECONDS) -> None:
    """End this process's use of wandb and its service within `seconds`.

    The service is a child process that may keep retrying a lost network after it was asked to stop; if so, it is
    killed. Call it after the last use of wandb: finishing a run has sent its data, which also stays in its folder. An
    open run of the caller (in a notebook) keeps the service.
    """
    import wandb

    if wandb.run is not None:
        return

    def teardown() -> None:
        with suppress(Exception):  # errors about a dead service help no one
            wandb.teardown()

    # A daemon thread does not block interpreter exit; teardown first unregisters wandb's exit handler.
    thread = threading.Thread(target=teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        for pid in service_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def service_pids() -> list[int]:
    """Process ids of wandb's services among the children of this process (Linux)."""
    children = [word for path in Path("/proc/self/task").glob("*/children") for word in path.read_text().split()]
    return [int(pid) for pid in children if _process_name(pid).startswith("wandb")]


def _process_name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
