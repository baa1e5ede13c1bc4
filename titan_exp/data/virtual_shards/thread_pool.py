"""A few threads that read ahead for the shards of a streaming source, whose readers wait for disks and networks.

They are daemons that are told to stop when their owner is closed, collected, or the interpreter exits: a read that
hangs can hold up neither.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")
_Task = tuple[Callable[[], object], "Future"] | None
_PATIENCE_SECONDS = 2.0


class DaemonThreadPool:
    """Runs tasks in `threads` threads. After `close`, tasks that wait are cancelled; those that run `check_open`."""

    def __init__(self, threads: int) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._closed = threading.Event()
        workers = [threading.Thread(target=_work, args=(self._tasks,), daemon=True) for _ in range(threads)]
        self.close = weakref.finalize(self, _stop, self._tasks, self._closed, workers)
        """Ends the threads; the second call does nothing."""
        for worker in workers:
            worker.start()

    def submit(self, task: "Callable[[], Result]") -> "Future[Result]":
        """Have a thread run `task`; the future is cancelled where this is closed first."""
        future: Future[Result] = Future()
        if self._closed.is_set():
            future.cancel()
        else:
            self._tasks.put((task, future))
        return future

    def check_open(self) -> None:
        """For tasks to call now and then; raises CancelledError once closed."""
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
        del job, task, future  # a waiting thread must not keep a finished task's data alive


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
        if worker is threading.current_thread():  # it held the last reference
            continue
        worker.join(_PATIENCE_SECONDS / len(workers))
