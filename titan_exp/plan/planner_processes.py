"""Worker processes of the planner: for ranks of a plan, plans of a search, and predictions before a launch. They end
with this process, even if it is killed. Imports no torch, which the launcher does not need, and the server imports."""

import gc
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from threading import RLock, Thread
from typing import Any, Generic, TypeVar

from titan_exp.plan.caching_allocator import Events, Reserved, steady_reserved

MIN_EVENTS = 30_000
"""Number of events of a step above which replaying takes longer than handing them to another process."""
T = TypeVar("T")


class Call(Generic[T]):
    """Call of a function, in a process of `pool` or in this process."""

    def __init__(self, pool: "PlannerProcesses | None", function: Callable[..., T], *args: object) -> None:
        self._function, self._args = function, args
        self._future: Future[T] | None = None
        if pool is not None:
            with suppress(BrokenProcessPool):
                self._future = pool.submit(function, *args)

    def result(self) -> T:
        """Return the result; if no process has begun the call, make it here."""
        if self._future is not None and not self._future.cancel():
            with suppress(BrokenProcessPool):  # a process was killed, perhaps because the machine ran out of memory
                return self._future.result()
        return self._function(*self._args)


class PlannerProcesses:
    """Up to `processes` processes, started at the first call. They end with the `with` block, even in the middle of a
    plan, which may take a minute. A server that has imported the planner, and stays, forks them. With `alone`, each
    imports the planner and the run's code itself."""

    def __init__(self, processes: int, *, alone: bool = False) -> None:
        self._processes, self._alone, self._futures = processes, alone, list[Future[Any]]()

    def submit(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Begin to call a function of a module."""
        future = self._pool.submit(function, *args)
        self._futures.append(future)
        return future

    def call(self, function: Callable[..., T], *args: object) -> Call[T]:
        """Begin to call a function whose result does not depend on the process, here if there are no others."""
        return Call(self if self._processes > 0 else None, function, *args)

    def replay(self, setup: Events, step: Events, *, expandable: bool, capacity: int | None) -> Call[Reserved]:
        """Begin to replay a rank's events, as `steady_reserved` does."""
        is_long = self._processes > 0 and len(step) > MIN_EVENTS
        return Call(self if is_long else None, _replay, setup, step, expandable, capacity)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        self._others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn") if self._alone else start_forkserver()
        return ProcessPoolExecutor(self._processes, context, _start_worker)

    def __enter__(self) -> "PlannerProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        if "_pool" not in vars(self):
            return
        if not all(future.done() or future.cancel() for future in self._futures):
            for worker in set(multiprocessing.active_children()) - self._others:
                worker.kill()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage, then collect none in the `with` block. As in the trainer's steps, reference cycles stay
    allocated. Collections would visit the many objects of a plan and of torch again and again."""
    collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    # Within such a block, only objects made since the last collection are visited.
    gc.collect(2 if collecting else 1)
    gc.disable()
    if not frozen:
        # Collections within the block visit the objects made in it.
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()


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


def _start_worker() -> None:
    """Silence this process, give it one thread, and tie its end to its parent. Ctrl-C reaches all processes of a
    terminal; only the parent handles it. Otherwise workers of a killed process pool would finish their work, which may
    take minutes."""
    from tqdm import tqdm

    os.environ["OMP_NUM_THREADS"] = "1"

    # Collections would visit, and thereby copy, all objects of the server.
    gc.freeze()
    # The default lock of torch's progress bars is a system semaphore; Python would warn that it leaks.
    tqdm.set_lock(RLock())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.INFO)
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a child process"

    def watch_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()
