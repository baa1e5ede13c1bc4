"""Fork server of the search's workers. Imports no torch, so that the server imports it while layouts are enumerated."""

import multiprocessing
import signal
from multiprocessing import forkserver
from typing import Any


def start_forkserver() -> Any:
    """Start the server, unless it runs, and return the multiprocessing context that forks workers from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_exp.plan.search.search"])
    # Ctrl-C reaches all processes of a terminal, and is handled by this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context
