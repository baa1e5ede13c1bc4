"""Daemon thread pool for prefetching the shards of a streaming source from disks and networks.

Threads stop when their owner is closed or garbage-collected, or the interpreter exits; `ThreadPoolExecutor` would wait
at exit for a hanging read.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")
_Task = tuple[Callable[[], object], "Future"] | None
_JOIN_TIMEOUT_SECONDS = 2.0


class DaemonThreadPool:
    """Runs tasks in daemon threads. `close` cancels queued tasks; running tasks poll `check_open`."""

    def __init__(self, threads: int) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._closed = threading.Event()
        workers = [threading.Thread(target=_work, args=(self._tasks,), daemon=True) for _ in range(threads)]
        self.close = weakref.finalize(self, _stop, self._tasks, self._closed, workers)
        """Stop the threads; idempotent."""
        for worker in workers:
            worker.start()

    def submit(self, task: "Callable[[], Result]") -> "Future[Result]":
        """Run `task` in a thread; the future is cancelled if the pool closes first."""
        future: Future[Result] = Future()
        if self._closed.is_set():
            future.cancel()
        else:
            self._tasks.put((task, future))
        return future

    def check_open(self) -> None:
        """Raise CancelledError once the pool is closed; for tasks to call regularly."""
        if self._closed.is_set():
            raise CancelledError


def _work(tasks: "SimpleQueue[_Task]") -> None:
    while (job := tasks.get()) is not None:
        task, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del job, task, future  # an idle thread must not keep references to a finished task's data


def _stop(tasks: "SimpleQueue[_Task]", closed: threading.Event, workers: list[threading.Thread]) -> None:
    closed.set()
    while True:
        try:
            job = tasks.get_nowait()
        except Empty:
            break
        if job is not None:
            job[1].cancel()
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        if worker is not threading.current_thread():  # a worker may hold the last reference to the pool
            worker.join(_JOIN_TIMEOUT_SECONDS / len(workers))
