"""The end of wandb's service process. wandb itself waits for it without limit, at the end of ours."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

SECONDS = 15.0
"""How long the service may take to send what it still holds, once every run has been finished."""


def stop_wandb_service(seconds: float = SECONDS) -> None:
    """End this process's use of wandb, and its service with it, within a limited time.

    The service is a child of this process that outlives a lost network poorly: told to stop, it may go on trying, and
    the exit handler that wandb registered waits for it. One that does not end is killed. Call it after the last use of
    wandb: what was logged is sent when a run is finished, and stays in its folder in any case. A run of the
    caller's own that is still open (in a notebook) keeps the service.

    Args:
        seconds: the limit.
    """
    import wandb

    if wandb.run is not None:
        return

    def end() -> None:
        with suppress(Exception):  # what it says of a service that is dead already is of no use to anybody
            wandb.teardown()

    # A daemon, so that it does not hold the interpreter up either; it first takes wandb's exit handler away.
    ending = threading.Thread(target=end, name="wandb-teardown", daemon=True)
    ending.start()
    ending.join(seconds)
    if ending.is_alive():
        for pid in services():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def services() -> list[int]:
    """The process ids of wandb's services that are children of this process (Linux)."""
    children = [word for path in Path("/proc/self/task").glob("*/children") for word in path.read_text().split()]
    return [int(pid) for pid in children if _name(pid).startswith("wandb")]


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
