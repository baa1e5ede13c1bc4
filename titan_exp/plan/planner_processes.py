"""Processes beside this one for parts of a prediction: optimizer steps, and replays of ranks' allocation events."""

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cached_property, partial
from itertools import chain
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
        if self._processes > 0 and len(step) > MIN_EVENTS:
            return Call(self._pool, _replay_packed, _packed(setup), _packed(step), expandable, capacity)
        return Call(None, partial(steady_reserved, setup, step, expandable=expandable, capacity=capacity))

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        self._started = True
        return ProcessPoolExecutor(self._processes, start_forkserver(), start_worker)


def _packed(events: Sequence[Event]) -> "array[int]":
    """Numbers of events, which are handed to another process at once."""
    return array("q", chain.from_iterable(events))


def _replay_packed(setup: "array[int]", step: "array[int]", expandable: bool, capacity: int | None) -> Reserved:
    with no_garbage_collection():
        before, events = (list(zip(*[iter(packed)] * 3, strict=True)) for packed in (setup, step))
        return steady_reserved(before, events, expandable=expandable, capacity=capacity)
