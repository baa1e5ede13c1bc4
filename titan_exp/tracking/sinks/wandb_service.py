"""Bounded shutdown of wandb's service process; wandb's exit handler waits for it without limit."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

SECONDS = 15.0
"""Seconds for the service to send its remaining data after every run is finished."""


def stop_wandb_service(seconds: float = SECONDS) -> None:
    """Shut down wandb and its service process within `seconds`.

    A service that keeps retrying a lost network is killed. Call it after the last use of wandb: finished runs have sent
    their data, which also stays in their folders. Does nothing while a run of the caller is open, as in a notebook.
    """
    import wandb

    if wandb.run is not None:
        return

    def teardown() -> None:
        with suppress(Exception):  # errors of a stopped service do not matter
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
