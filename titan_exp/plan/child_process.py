"""Child processes: a fork server that imports the planner, and children that end with their parent, even when it is
killed. Imports no torch, so that the server does while the command is composed."""

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.connection import wait
from threading import Thread
from typing import Any


def start_forkserver() -> Any:
    """Start the server, unless it runs, and return the multiprocessing context that forks workers from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_exp.plan.predict"])
    # Ctrl-C reaches all processes of a terminal, and is handled by this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def start_worker() -> None:
    """End this process when its parent ends, and leave Ctrl-C, which reaches all processes of a terminal, to it."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent() -> None:
    """End this process when its parent ends.

    Without it, workers of a killed process pool finish their current work, which may take minutes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()
