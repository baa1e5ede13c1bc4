"""Processes beside this one for parts of a prediction, from a fork server that imports the planner. They end with this
one, even when it is killed. Imports no torch, so that the server does while a command is composed."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from threading import RLock, Thread
from typing import Any, Generic, TypeVar

from titan_exp.plan.cuda.caching_allocator import Events, Reserved, steady_reserved
from titan_exp.plan.garbage_collection import no_garbage_collection

MIN_EVENTS = 30_000
"""Events of a step whose replay takes longer than handing them to another process."""
T = TypeVar("T")


class Call(Generic[T]):
    """Call of a function, in a process of `pool` or here."""

    def __init__(self, pool: ProcessPoolExecutor | None, function: Callable[..., T], *args: object) -> None:
        self._function, self._args = function, args
        self._future: Future[T] | None = None
        if pool is not None:
            with suppress(BrokenProcessPool):
                self._future = pool.submit(function, *args)

    def result(self) -> T:
        """Result of the call, which is made here if no process has begun it."""
        if self._future is not None and not self._future.cancel():
            with suppress(BrokenProcessPool):  # killed, such as for the machine's memory
                return self._future.result()
        return self._function(*self._args)


class PlannerProcesses(ExitStack):
    """Processes on `cores` cores, this one included; started at the first call, until the `with` block ends."""

    def __init__(self, cores: int) -> None:
        super().__init__()
        self._processes = cores - 1

    def call(self, function: Callable[..., T], *args: object) -> Call[T]:
        """Begin to call a function of a module; its result is not changed by where it runs."""
        return Call(self._pool if self._processes > 0 else None, function, *args)

    def replay(self, setup: Events, step: Events, *, expandable: bool, capacity: int | None) -> Call[Reserved]:
        """Begin to replay a rank's events, as `steady_reserved` does."""
        pool = self._pool if self._processes > 0 and len(step) > MIN_EVENTS else None
        return Call(pool, _replay, setup, step, expandable, capacity)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(self._processes, start_forkserver(), start_worker)
        self.push(lambda kind, *_: pool.shutdown(wait=kind is None, cancel_futures=True))
        return pool


def _replay(setup: Events, step: Events, expandable: bool, capacity: int | None) -> Reserved:
    with no_garbage_collection():
        return steady_reserved(setup, step, expandable=expandable, capacity=capacity)


def start_forkserver() -> Any:
    """Start the server, unless it runs, and return the multiprocessing context that forks workers from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_exp.plan.predict"])
    # The tracker unblocks signals when it starts.
    resource_tracker.ensure_running()
    # Ctrl-C reaches all processes of a terminal, and is handled by this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return context


def start_worker() -> None:
    """End this process when its parent ends, and leave Ctrl-C, which reaches all processes of a terminal, to it."""
    # Collections would visit, and thereby copy, all objects of the server.
    gc.freeze()
    make_killable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_killable() -> None:
    """End this process when its parent ends, and let it leave no semaphore, of which Python would warn.

    Else workers of a killed process pool finish their current work, which may take minutes.
    """
    from tqdm import tqdm

    # The default lock of torch's progress bars is a semaphore of the system.
    tqdm.set_lock(RLock())
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()
