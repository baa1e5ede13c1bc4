"""Search of layouts: best-first over the enumerated keys, then coordinate descent over all keys from the best rows.

Estimates, scaled from the nearest trace (`estimates.py`), choose the layouts to trace. Totals extrapolated from traces
rank these, and `titan-exp plan` confirms the fastest by the gate's rule.
"""

import gc
import logging
import math
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.group_share import share_of_group
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.config.machine.local_machine import usable_cores
from titan_exp.plan.child_process import start_forkserver, start_worker
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.device_memory import room_of
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.extrapolate.sample_key import sample_keys
from titan_exp.plan.extrapolate.stages import ExtrapolationError
from titan_exp.plan.extrapolate.step_cost import TracedParts, trace_parts
from titan_exp.plan.garbage_collection import no_garbage_collection
from titan_exp.plan.predict import on_cpu
from titan_exp.plan.search.estimates import Estimates
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.plan.search.layout_cost import LayoutCost, layout_cost, planned_cost
from titan_exp.plan.search.layouts import KEYS, Candidate, SearchSpace
from titan_exp.plan.search.moves import moves
from titan_exp.plan.search.profile import profile_of

SLOWER = 1.1
"""Neighbours of the fastest layout are traced unless they are estimated to take at least so many times as long."""

REFUSED, EXCESS = 2, 1.3
"""Number of layouts per round that are faster than the best but do not fit, from which the descent goes towards less
memory, if they need no more than so many times the device's."""

EXPLORING = 0.7
"""Share of a time limit after which rows are only confirmed."""

LONGEST_SCHEDULE = 2**13
"""Maximum number of forward passes (stages times micro-batches) of a simulated schedule; longer ones take seconds."""

WITHOUT_TRACE = ("activation_checkpoint.every", "parallelism.pp_layers_per_stage")
"""Refined keys that change how often traced parts occur, and no part."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: list[LayoutCost]
    """Fastest layouts that fit, fastest first, and planned unless the search was stopped."""
    front: list[bool]
    """True for each row on the Pareto front of speed and memory."""
    smallest: LayoutCost | None
    """Looked at layout that needs the least memory."""
    looked_at: int
    """Number of layouts whose cost was extrapolated or planned."""
    too_large: int
    """Number of these layouts that do not fit."""
    floor: int
    """Layouts whose estimated memory does not fit."""
    slower: int
    """Layouts whose estimated time exceeds the last row's."""
    unknown: list[tuple[str, int]]
    """Layouts that cannot be extrapolated, counted by reason."""
    traces: int
    """Traced profiles."""
    seconds: float
    """Duration of the search."""
    stopped: bool = False
    """True if Ctrl-C or the time limit ended the search: rows are the fastest so far, and `slower` may be faster."""


class LayoutSearch:
    """Search for the fastest `limit` layouts, with one process per core.

    `show` is called with progress lines. Without `bounded`, every enumerated layout is extrapolated.
    """

    def __init__(
        self, space: SearchSpace, device: Device, limit: int, show: Callable[[str], None], *, bounded: bool = True
    ) -> None:
        self._space, self._device, self._limit, self._show, self._bounded = space, device, limit, show, bounded
        checks = LayoutChecks((_too_long, unsupported_reason), KEYS)
        reasons = [checks.first(candidate.experiment) for candidate in space.candidates]
        self._unknown = Counter(reason for reason in reasons if reason is not None).most_common()
        supported = [each for each, reason in zip(space.candidates, reasons, strict=True) if reason is None]
        self._candidates = [replace(each, number=number) for number, each in enumerate(supported)]
        self._room = np.array([room_of(each.layout, device) for each in self._candidates])
        self._open = np.ones(len(supported), dtype=bool)
        self._traced: dict[Key, tuple[Candidate, TracedParts]] = {}
        self._costs: dict[Key, LayoutCost] = {}
        self._expanded = set[Key]()
        self._deadline = math.inf

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self._candidates, self._device)

    @cached_property
    def _numbers(self) -> dict[Key, int]:
        return {each.base: each.number for each in self._candidates}

    def run(self, seconds: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds`; Ctrl-C ends it early, too. Raises UserError if an option of a layout is
        not supported."""
        began, stopped = time.perf_counter(), False
        self._deadline = math.inf if seconds is None else time.monotonic() + EXPLORING * seconds
        cores = usable_cores()
        pool = ProcessPoolExecutor(cores, start_forkserver(), _start_worker)
        # A pool that is interrupted while it starts cannot be shut down.
        pool.submit(os.getpid)
        try:
            with interrupt_after(seconds):
                self._search(pool, cores)
            stopped = self._late
        except KeyboardInterrupt:
            stopped = True
            # Running traces may take a minute.
            for worker in multiprocessing.active_children():
                worker.kill()
        finally:
            pool.shutdown(cancel_futures=True)
        rows, costs = self._fastest()[: self._limit], list(self._costs.values())
        front = [all(row.needed < faster.needed for faster in rows[:place]) for place, row in enumerate(rows)]
        floor = int((self._open & (self._estimates.least_bytes > self._room)).sum()) if self._candidates else 0
        return SearchResult(
            rows,
            front,
            min(costs, key=lambda cost: cost.needed, default=None),
            len(costs),
            sum(not cost.fits for cost in costs),
            floor,
            len(self._candidates) - sum(cost.candidate.number >= 0 for cost in costs) - floor,
            self._unknown,
            len(self._traced),
            time.perf_counter() - began,
            stopped,
        )

    @property
    def _late(self) -> bool:
        return time.monotonic() > self._deadline

    def _search(self, pool: ProcessPoolExecutor, cores: int) -> None:
        self._evaluate(pool, self._seeds())
        state = None
        while state != (state := (len(self._costs), sum(cost.reserved is not None for cost in self._costs.values()))):
            # What the allocator refuses leaves room for other rows.
            self._explore(pool, cores)
            if self._bounded:
                self._refine(pool, cores)
            self._confirm(pool, self._limit)
        if not self._fastest() and self._open.any():
            # Its peak tells what is missing.
            self._evaluate(pool, [self._candidates[int(np.where(self._open, self._estimates.bytes, np.inf).argmin())]])

    def _seeds(self) -> list[Candidate]:
        """Layouts traced first: simple ones of every mode of activation checkpointing, with and without a pipeline and
        tensor parallelism in a node."""
        seeds: dict[Key, Candidate] = {}
        modes = list(dict.fromkeys(each.mode for each in self._candidates))[::-1]  # the least memory first
        for mode, pipeline, split in product(modes, (True, False), (False, True)):
            group = [
                each
                for each in self._candidates
                if (each.mode, each.parallelism.pp > 1, each.parallelism.tp > 1) == (mode, pipeline, split)
            ]
            sizes = sorted({each.layout.micro_batch_size for each in group})
            # Two sizes of micro-batches separate bytes of experts' weights from those of tokens.
            two = bool(group) and group[0].experts is not None and not split
            for size in {*sizes[:1], *sizes[-1:]} if two else {*sizes[:1]}:
                alike = [each for each in group if each.layout.micro_batch_size == size]
                simplest = min(alike, key=_simplicity)
                seeds.setdefault(_key(simplest), simplest)
        return list(seeds.values())

    def _evaluate(self, pool: ProcessPoolExecutor, candidates: Iterable[Candidate]) -> None:
        """Trace what candidates need, and extrapolate them. Moves that cannot be extrapolated are left out."""
        waiting: dict[Key, list[Candidate]] = {}
        for candidate in candidates:
            waiting.setdefault(_key(candidate), []).append(candidate)
        for key in waiting.keys() & self._traced.keys():
            for candidate in waiting.pop(key):
                self._extrapolate(candidate)
        futures = {pool.submit(_trace, group[0]): group for group in waiting.values()}
        for future in as_completed(futures):
            group = futures[future]
            if future.exception() is None or group[0].number >= 0:
                self._add_trace(*future.result())
                for candidate in group[1:]:
                    self._extrapolate(candidate)
            if self._late:
                for other in futures:
                    other.cancel()
                return

    def _add_trace(self, candidate: Candidate, parts: TracedParts) -> None:
        """Use a traced layout for estimates, and extrapolate it."""
        self._traced[_key(candidate)] = candidate, parts
        cost = self._extrapolate(candidate)
        profile = profile_of(candidate, parts) if candidate.number >= 0 else None
        if profile is not None and cost is not None:
            self._estimates.add(profile, cost)
        self._report()

    def _report(self) -> None:
        text = f"{len(self._traced)} profiles traced, {len(self._costs)} layouts extrapolated"
        self._show(text + "".join(f"; fastest so far: {cost}" for cost in self._fastest()[:1]))

    def _explore(self, pool: ProcessPoolExecutor, cores: int) -> None:
        """Extrapolate enumerated layouts in the order of their estimates until no other can enter the rows."""
        running: dict[Future[tuple[Candidate, TracedParts]], int] = {}
        while True:
            # Layouts with better estimates may suffice: wait for their traces before tracing slower ones.
            while len(running) < cores and not (running and self._enough(len(running))):
                candidate = None if self._late else self._next(running.values())
                if candidate is None:
                    break
                if _key(candidate) in self._traced:
                    self._extrapolate(candidate)
                    continue
                self._open[candidate.number] = False
                running[pool.submit(_trace, candidate)] = candidate.number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                self._add_trace(*future.result())

    def _enough(self, waiting: int) -> bool:
        """True if the rows would be complete if every pending layout fit."""
        found = len(self._fastest())
        return found + waiting >= self._limit > found

    def _next(self, running: Iterable[int]) -> Candidate | None:
        """Layout with the best estimate that may still enter the rows, or None; without those of which a running trace
        tells more than the finished ones."""
        if not self._candidates:
            return None
        estimates, allowed = self._estimates, self._open & ~self._estimates.awaiting(running)
        if self._bounded:
            rows = self._fastest()
            slowest = rows[self._limit - 1].step_seconds if len(rows) >= self._limit else math.inf
            allowed = allowed & (estimates.least_bytes <= self._room) & (estimates.least_seconds <= slowest)
        number = int(np.where(allowed, estimates.seconds, np.inf).argmin())
        return self._candidates[number] if allowed[number] else None

    def _extrapolate(self, candidate: Candidate) -> LayoutCost | None:
        """Cost of a layout with a traced profile; None for a move that cannot be extrapolated."""
        try:
            cost = layout_cost(candidate, *self._traced[_key(candidate)], self._device)
        except ExtrapolationError:
            if candidate.number >= 0:
                raise
            return None
        if candidate.number >= 0:
            self._open[candidate.number] = False
        self._costs[candidate.identity] = cost
        return cost

    def _fastest(self) -> list[LayoutCost]:
        """Layouts that fit, fastest first; of those that only refine the same layout, the fastest."""
        found: dict[Key, LayoutCost] = {}
        for cost in sorted((cost for cost in self._costs.values() if cost.fits), key=lambda cost: cost.step_seconds):
            found.setdefault(cost.candidate.base, cost)
        return list(found.values())

    def _refine(self, pool: ProcessPoolExecutor, cores: int) -> None:
        """Coordinate descent over all keys from the fastest layout, and from faster ones that do not fit."""
        while not self._late:
            self._confirm(pool, cores)
            starts = [cost for cost in self._starts() if cost.candidate.identity not in self._expanded]
            if not starts:
                return
            self._expanded |= {cost.candidate.identity for cost in starts}
            near = {moved.identity: moved for start in starts for moved in self._near(start)}
            self._evaluate(pool, near.values())

    def _starts(self) -> list[LayoutCost]:
        best = self._fastest()[:1]
        limit = best[0].step_seconds if best else math.inf
        refused = [cost for cost in self._costs.values() if cost.step_seconds < limit and not cost.fits]
        close = [cost for cost in refused if cost.needed <= EXCESS * cost.room]
        return [*best, *sorted(close, key=lambda cost: cost.step_seconds if best else cost.needed)[:REFUSED]]

    def _near(self, start: LayoutCost) -> Iterator[Candidate]:
        """Moves from a layout that may be faster and fit."""
        for direction, moved in moves(start.candidate, self._space, self._device):
            useful = direction >= 0 if start.fits else direction <= 0 and moved.base[:-1] == start.candidate.base[:-1]
            if useful and moved.identity not in self._costs and _too_long(moved.experiment) is None:
                number = self._numbers.get(moved.base, -1)
                if not start.fits or self._may_be_faster(start, number):
                    yield moved if moved.refined else replace(moved, number=number)

    def _may_be_faster(self, start: LayoutCost, number: int) -> bool:
        """True if an enumerated layout, or one refined like `start`, may be nearly as fast and fit, by estimates."""
        own, estimates = self._numbers.get(start.candidate.base, -1), self._estimates
        if number in (-1, own) or own == -1:
            return True
        seconds = start.step_seconds * estimates.least_seconds[number] / estimates.seconds[own]
        needed = start.needed + estimates.least_bytes[number] - estimates.bytes[own]
        return bool(seconds <= SLOWER * start.step_seconds and needed <= self._room[number])

    def _confirm(self, pool: ProcessPoolExecutor, count: int) -> None:
        """Plan the fastest layouts, until `count` fit by the rule of the gate."""
        while pending := [cost for cost in self._fastest()[:count] if cost.reserved is None]:
            self._show(f"planning the fastest {len(pending)} that are not planned yet")
            for future in as_completed([pool.submit(planned_cost, cost.candidate, self._device) for cost in pending]):
                cost = future.result()
                self._costs[cost.candidate.identity] = cost
                self._report()


def _simplicity(candidate: Candidate) -> tuple[object, ...]:
    """Sort key: few axes in use, whose messages estimates of others lack, so that these are tried."""
    parallelism = candidate.parallelism
    return (
        parallelism.dp_shard == 1,
        parallelism.cp,
        parallelism.ep,
        parallelism.etp,
        abs(parallelism.tp - candidate.layout.node_size) if parallelism.tp > 1 else 0,
        parallelism.pp,
    )


def _key(candidate: Candidate) -> Key:
    """Cache key of a profile; the number of shards only divides persistent bytes, which are copied if offloaded."""
    parallelism, layout = candidate.parallelism, candidate.layout
    pipeline = parallelism.pp > 1
    return (
        parallelism.tp,
        parallelism.cp,
        candidate.experts,
        candidate.mode,
        tuple(part for part in candidate.refined if part[0] not in WITHOUT_TRACE),
        layout.micro_batch_size,
        pipeline,
        frozenset(sample_keys(candidate.experiment)),
        None if pipeline else min(layout.gradient_accumulation, 3),
        candidate.shards if parallelism.cpu_offload else parallelism.dp_shard > 1,
        parallelism.dp_replicate > 1,
    )


def _too_long(experiment: Experiment) -> str | None:
    layout = ResolvedLayout.of(share_of_group(experiment))
    if layout.parallelism.pp == 1 or layout.stage_count * layout.gradient_accumulation <= LONGEST_SCHEDULE:
        return None
    return f"their schedules have more than {LONGEST_SCHEDULE:,} forward passes"


@contextmanager
def interrupt_after(seconds: float | None) -> Iterator[None]:
    """Interrupt the `with` block as Ctrl-C does after `seconds`; None for no limit."""
    before = None
    if seconds is not None:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _start_worker() -> None:
    """Silence the log of model builds."""
    start_worker()
    logging.disable(logging.INFO)


def _trace(candidate: Candidate) -> tuple[Candidate, TracedParts]:
    experiment = share_of_group(candidate.experiment)
    try:
        with no_garbage_collection():
            parts = trace_parts(on_cpu(experiment), cuda=device_type(experiment.cluster) == "cuda")
    except ExtrapolationError as error:
        raise UserError(f"plan search: {error}. titan-exp plan predicts one layout.") from error
    _freeze_imports()
    return candidate, parts


@cache
def _freeze_imports() -> None:
    """Exempt what the first trace imports from garbage collection, which slows every trace."""
    gc.freeze()
