"""Replays of several ranks' allocation events in other processes, beside the traces of further ranks."""

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING

from titan_exp.config.machine.local_machine import usable_cores
from titan_exp.plan.child_process import end_with_parent
from titan_exp.plan.cuda.caching_allocator import Reserved, steady_reserved

if TYPE_CHECKING:  # the processes need no torch
    from titan_exp.plan.trace.trace_step import Trace

MIN_EVENTS = 30_000
"""Events of a step whose replay takes longer than handing them to another process."""


class ReplayProcesses:
    """Replays of `ranks` ranks, as `steady_reserved` with these arguments; long ones in processes, if several."""

    def __init__(self, ranks: int, *, expandable: bool, capacity: int | None) -> None:
        self._replay = partial(steady_reserved, expandable=expandable, capacity=capacity)
        self._processes = min(ranks, usable_cores())
        self._started = False
        self._found: dict[int, tuple[Callable[[], Reserved], Future[Reserved] | None]] = {}

    def __enter__(self) -> "ReplayProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._started:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def submit(self, rank: int, trace: "Trace") -> None:
        """Begin to replay the events of a rank's trace."""
        replay, future = partial(self._replay, trace.setup_events, trace.step_events), None
        if self._processes > 1 and len(trace.step_events) > MIN_EVENTS:
            with suppress(BrokenProcessPool):
                future = self._pool.submit(replay)
        self._found[rank] = replay, future

    def result(self, rank: int) -> Reserved:
        """Statistics of a submitted rank."""
        replay, future = self._found[rank]
        if future is not None:
            with suppress(BrokenProcessPool):  # killed, such as for the machine's memory
                return future.result()
        return replay()

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        self._started = True
        # Spawned, since a fork would copy torch's threads.
        return ProcessPoolExecutor(self._processes, multiprocessing.get_context("spawn"), _start_worker)


def _start_worker() -> None:
    end_with_parent()
    # The parent handles Ctrl-C, which reaches all processes of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
