"""Processes beside this one for parts of a prediction: optimizer steps, and replays of ranks' allocation events."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Generic, TypeVar

from titan_exp.plan.child_process import start_forkserver, start_worker
from titan_exp.plan.cuda.caching_allocator import Event, Reserved, steady_reserved
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


class PlannerProcesses:
    """Processes on `cores` cores, this one included; started at the first call."""

    def __init__(self, cores: int) -> None:
        self._processes = cores - 1
        self._started = False

    def __enter__(self) -> "PlannerProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._started:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def call(self, function: Callable[..., T], *args: object) -> Call[T]:
        """Begin to call a function of a module; its result is not changed by where it runs."""
        return Call(self._pool if self._processes > 0 else None, function, *args)

    def replay(
        self, setup: Sequence[Event], step: Sequence[Event], *, expandable: bool, capacity: int | None
    ) -> Call[Reserved]:
        """Begin to replay a rank's events, as `steady_reserved` does."""
        pool = self._pool if self._processes > 0 and len(step) > MIN_EVENTS else None
        return Call(pool, _replay, setup, step, expandable, capacity)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        self._started = True
        return ProcessPoolExecutor(self._processes, start_forkserver(), start_worker)


def _replay(setup: Sequence[Event], step: Sequence[Event], expandable: bool, capacity: int | None) -> Reserved:
    with no_garbage_collection():
        return steady_reserved(setup, step, expandable=expandable, capacity=capacity)
