"""Search of layouts: best-first over the enumerated keys, then coordinate descent over all keys from the best rows.

Estimates, scaled from the nearest samples (`estimates.py`), choose the layouts that `titan-exp plan` predicts; its
times rank them, and the gate's rule decides which fit.
"""

import logging
import math
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout, share_of_world
from titan_exp.config.machine.devices import usable_cores
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.device_memory import room_of
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.extrapolate.sample import trace_samples
from titan_exp.plan.extrapolate.stages import ExtrapolationError
from titan_exp.plan.planner_processes import no_garbage_collection, start_forkserver, start_worker
from titan_exp.plan.predict import as_traced
from titan_exp.plan.search.estimates import Estimates
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.plan.search.layout_cost import LayoutCost, planned_cost
from titan_exp.plan.search.layouts import KEYS, Candidate, SearchSpace
from titan_exp.plan.search.moves import moves
from titan_exp.plan.search.profile import Profile, profile_of

SLOWER = 1.1
"""Neighbours of the fastest layout are planned unless they are estimated to take at least so many times as long."""

REFUSED, EXCESS = 2, 1.3
"""Number of layouts per round that are faster than the best but do not fit, from which the descent goes towards less
memory, if they need no more than so many times the device's."""

PLAIN = ("dp_shard", "tp", "dp_replicate", "pp", "cp", "ep")
"""Axes of plain layouts: FSDP alone, and with one other axis, tensor parallelism within a node. One of each is planned
before the search follows its estimates, so that one that is cut off early has them."""

LONGEST_SCHEDULE = 2**13
"""Maximum number of forward passes (stages times micro-batches) of a simulated schedule; longer ones take seconds."""

Key = tuple[Any, ...]


class Evaluated(NamedTuple):
    """Sampled or planned layout."""

    candidate: Candidate
    profile: Profile | None = None
    """Profile of its samples, if it has any."""
    cost: LayoutCost | None = None
    unknown: str = ""
    """Reason that it cannot be extrapolated, or empty."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: list[LayoutCost]
    """Fastest layouts that fit, fastest first."""
    front: list[bool]
    """True for each row on the Pareto front of speed and memory."""
    smallest: LayoutCost | None
    """Planned layout that needs the least memory."""
    planned: int
    """Number of planned layouts."""
    too_large: int
    """Number of these layouts that do not fit."""
    floor: int
    """Layouts whose estimated memory does not fit."""
    slower: int
    """Layouts whose estimated time exceeds the last row's."""
    unknown: list[tuple[str, int]]
    """Layouts that cannot be extrapolated, counted by reason."""
    seconds: float
    stopped: bool = False
    """True if Ctrl-C or the time limit ended the search: rows are the fastest so far, and `slower` may be faster."""


class LayoutSearch:
    """Search for the fastest `limit` layouts, with one process per core.

    `show` is called with progress lines.
    """

    def __init__(self, space: SearchSpace, device: Device, limit: int, show: Callable[[str], None]) -> None:
        self._space, self._device, self._limit, self._show = space, device, limit, show
        checks = LayoutChecks((_too_long, unsupported_reason), KEYS)
        reasons = [checks.first(candidate.experiment) for candidate in space.candidates]
        self._unknown = Counter(reason for reason in reasons if reason is not None)
        supported = [each for each, reason in zip(space.candidates, reasons, strict=True) if reason is None]
        self._candidates = [replace(each, number=number) for number, each in enumerate(supported)]
        self._room = np.array([room_of(each.layout, each.spec, device) for each in self._candidates])
        self._numbers = {each.base: each.number for each in self._candidates}
        self._open = np.ones(len(supported), dtype=bool)
        self._sampled = set[int]()
        self._costs: dict[Key, LayoutCost] = {}
        self._expanded, self._refused = set[Key](), set[Key]()
        self._plain: dict[str, list[int]] = {axis: [] for axis in PLAIN}
        """Layouts of each plain kind that has no planned one yet."""
        for each in self._candidates:
            if (kind := _plain_kind(each, space.fixed)) is not None:
                self._plain[kind].append(each.number)

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self._candidates, self._device)

    def run(self, seconds: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds`; Ctrl-C ends it early, too. Raises UserError if an option of a layout is
        not supported."""
        began, stopped = time.perf_counter(), False
        cores = usable_cores()
        pool = ProcessPoolExecutor(cores, start_forkserver(), _start_worker)
        # A pool that is interrupted while it starts cannot be shut down.
        pool.submit(os.getpid)
        try:
            with interrupt_after(seconds):
                self._search(pool, cores)
        except KeyboardInterrupt:
            stopped = True
            # Running plans may take a minute.
            for worker in multiprocessing.active_children():
                worker.kill()
        finally:
            pool.shutdown(cancel_futures=True)
        rows, costs = self._fastest()[: self._limit], list(self._costs.values())
        front = [all(row.reserved < faster.reserved for faster in rows[:place]) for place, row in enumerate(rows)]
        smallest, too_large = (
            min(costs, key=lambda cost: cost.reserved, default=None),
            sum(not cost.fits for cost in costs),
        )
        floor = int((self._open & (self._estimates.least_bytes > self._room)).sum()) if self._candidates else 0
        left_out = too_large, floor, int(self._open.sum()) - floor, self._unknown.most_common()
        return SearchResult(rows, front, smallest, len(costs), *left_out, time.perf_counter() - began, stopped)

    def _search(self, pool: ProcessPoolExecutor, cores: int) -> None:
        seeds, known = self._seeds(), -1
        while known != (known := len(self._costs)):
            self._explore(pool, cores, seeds)
            self._refine(pool)
        # Where nothing fits, the peak of the smallest layout tells what is missing.
        while not self._fastest() and self._open.any() and known == len(self._costs):
            smallest = int(np.where(self._open, self._estimates.bytes, np.inf).argmin())
            self._add(self._begin(pool, self._candidates[smallest]))

    def _seeds(self) -> list[Candidate]:
        """Layouts sampled first: simple ones of every mode of activation checkpointing, with and without a pipeline and
        tensor parallelism in a node."""
        simplest: dict[tuple[str, bool, bool], dict[int, Candidate]] = defaultdict(dict)
        for each in sorted(self._candidates, key=_simplicity):
            of_kind = simplest[each.mode, each.parallelism.pp > 1, each.parallelism.tp > 1]
            of_kind.setdefault(each.layout.micro_batch_size, each)
        seeds = list[Candidate]()
        modes = list(dict.fromkeys(each.mode for each in self._candidates))[::-1]  # the least memory first
        for mode, pipeline, split in product(modes, (True, False), (False, True)):
            sizes = sorted(by_size := simplest[mode, pipeline, split])
            # Two sizes of micro-batches separate bytes of experts' weights from those of tokens.
            two = self._candidates[0].experts is not None and not split
            seeds += [by_size[size] for size in ({*sizes[:1], *sizes[-1:]} if two else sizes[:1])]
        return seeds

    def _begin(self, pool: ProcessPoolExecutor, candidate: Candidate) -> Future[Evaluated]:
        """Begin to plan an enumerated layout, or to sample it if its estimate is from a layout that is far."""
        if self._estimates.near[candidate.number] or candidate.number in self._sampled:
            return pool.submit(_plan, candidate, self._device)
        self._sampled.add(candidate.number)
        return pool.submit(_sample, candidate, self._device)

    def _add(self, future: Future[Evaluated]) -> None:
        """Use a sampled or planned layout."""
        candidate, profile, cost, unknown = future.result()
        if profile is not None:
            self._estimates.add(profile, cost)
        if cost is not None:
            self._costs[candidate.identity] = cost
            if candidate.number >= 0:
                self._open[candidate.number] = False
        elif candidate.number < 0:
            self._refused.add(candidate.identity)
        elif unknown:
            self._open[candidate.number] = False
            self._unknown[unknown] += 1
        fastest = "".join(f"; fastest so far: {cost}" for cost in self._fastest()[:1])
        self._show(f"{len(self._costs)} layouts planned{fastest}")

    def _explore(self, pool: ProcessPoolExecutor, cores: int, seeds: list[Candidate]) -> None:
        """Plan enumerated layouts in the order of their estimates until no other can enter the rows.

        All `seeds` are begun, and taken off their list, before a second layout is planned: the first is a row to show.
        """
        running: dict[Future[Evaluated], int] = {}
        shown = False
        while True:
            found = len(self._fastest())
            # Layouts with better estimates may suffice: wait for their plans before planning slower ones.
            while len(running) < cores and (seeds or not running or not found + len(running) >= self._limit > found):
                candidate = self._next_plain(running.values())
                if candidate is None and not (seeds and shown):
                    candidate = self._next(running.values(), near=bool(seeds))
                shown = shown or candidate is not None
                if candidate is None and not seeds:
                    break
                candidate = candidate or seeds.pop(0)
                if not self._open[candidate.number] or candidate.number in running.values():
                    continue  # a seed that is a plain layout, too
                running[self._begin(pool, candidate)] = candidate.number
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                del running[future]
                self._add(future)

    def _next(self, running: Iterable[int], *, near: bool = False) -> Candidate | None:
        """Layout with the best estimate that may still enter the rows, or None; without those of which a running plan
        tells more than the finished ones, and with `near` only of those whose estimates are near."""
        if not self._candidates:
            return None
        estimates, allowed = self._estimates, self._open & ~self._estimates.awaiting(running)
        allowed &= estimates.near | (not near)
        rows = self._fastest()
        slowest = rows[self._limit - 1].step_seconds if len(rows) >= self._limit else math.inf
        allowed = allowed & (estimates.least_bytes <= self._room) & (estimates.least_seconds <= slowest)
        number = int(np.where(allowed, estimates.seconds, np.inf).argmin())
        return self._candidates[number] if allowed[number] else None

    def _next_plain(self, running: Collection[int]) -> Candidate | None:
        """Layout with the best estimate among those of a plain kind that is neither planned nor being traced, or None;
        also before the first estimate."""
        estimates = self._estimates
        for kind, numbers in list(self._plain.items()):
            alike = [number for number in numbers if self._open[number]]
            fitting = [number for number in alike if 0 < estimates.least_bytes[number] <= self._room[number]]
            if len(alike) < len(numbers) or (estimates.seconds.any() and not fitting):
                del self._plain[kind]
            elif fitting and not set(numbers) & set(running):
                return self._candidates[min(fitting, key=lambda number: estimates.seconds[number])]
        return None

    def _fastest(self) -> list[LayoutCost]:
        """Layouts that fit, fastest first; of those that only refine the same layout, the fastest."""
        found: dict[Key, LayoutCost] = {}
        for cost in sorted((cost for cost in self._costs.values() if cost.fits), key=lambda cost: cost.step_seconds):
            found.setdefault(cost.candidate.base, cost)
        return list(found.values())

    def _refine(self, pool: ProcessPoolExecutor) -> None:
        """Coordinate descent over all keys from the fastest layout, and from faster ones that do not fit."""
        while starts := [cost for cost in self._starts() if cost.candidate.identity not in self._expanded]:
            self._expanded |= {cost.candidate.identity for cost in starts}
            near = {moved.identity: moved for start in starts for moved in self._near(start)}
            for future in as_completed([pool.submit(_plan, moved, self._device) for moved in near.values()]):
                self._add(future)

    def _starts(self) -> list[LayoutCost]:
        best = self._fastest()[:1]
        limit = best[0].step_seconds if best else math.inf
        refused = [cost for cost in self._costs.values() if cost.step_seconds < limit and not cost.fits]
        close = [cost for cost in refused if cost.reserved <= EXCESS * cost.room]
        return [*best, *sorted(close, key=lambda cost: cost.step_seconds if best else cost.reserved)[:REFUSED]]

    def _near(self, start: LayoutCost) -> Iterator[Candidate]:
        """Moves from a layout that may be faster and fit."""
        for direction, moved in moves(start.candidate, self._space, self._device):
            useful = direction >= 0 if start.fits else direction <= 0 and moved.base[:-1] == start.candidate.base[:-1]
            known = moved.identity in self._costs or moved.identity in self._refused
            if useful and not known and _too_long(moved.experiment) is None:
                number = self._numbers.get(moved.base, -1)
                if not start.fits or self._may_be_faster(start, number):
                    yield moved if moved.refined else replace(moved, number=number)

    def _may_be_faster(self, start: LayoutCost, number: int) -> bool:
        """True if an enumerated layout, or one refined like `start`, may be nearly as fast and fit, by estimates."""
        own, estimates = self._numbers.get(start.candidate.base, -1), self._estimates
        if number in (-1, own) or own == -1:
            return True
        seconds = start.step_seconds * estimates.least_seconds[number] / estimates.seconds[own]
        needed = start.reserved + estimates.least_bytes[number] - estimates.bytes[own]
        return bool(seconds <= SLOWER * start.step_seconds and needed <= self._room[number])


def _plain_kind(candidate: Candidate, fixed: Collection[str]) -> str | None:
    """Axis that a plain layout uses besides FSDP and typed degrees; None for other layouts."""
    own = candidate.parallelism
    used = [axis for axis in PLAIN[1:] if f"parallelism.{axis}" not in fixed and getattr(own, axis) > 1]
    if len(used) > 1 or own.tp > max(1, candidate.layout.node_size) or (own.dp_shard == 1 and "pp" not in used):
        return None
    return used[0] if used else PLAIN[0]


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


def _too_long(experiment: Experiment) -> str | None:
    layout = ResolvedLayout.of(share_of_world(experiment))
    if layout.parallelism.pp == 1 or layout.stage_count * layout.gradient_accumulation <= LONGEST_SCHEDULE:
        return None
    return f"their schedules have more than {LONGEST_SCHEDULE:,} forward passes"


@contextmanager
def interrupt_after(seconds: float | None) -> Iterator[None]:
    """Interrupt the `with` block as Ctrl-C does after `seconds`, and each second from then on; None for no limit."""
    before = None
    if seconds is not None:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        # Repeated, since Python ignores an interrupt in a finalizer.
        signal.setitimer(signal.ITIMER_REAL, seconds, 1)
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


def _sample(candidate: Candidate, device: Device) -> Evaluated:
    """Profile of a layout that is not planned."""
    with no_garbage_collection(), suppress(ExtrapolationError):
        samples = trace_samples(as_traced(candidate.experiment, device), cuda=True)
        return Evaluated(candidate, profile_of(candidate, samples))
    return Evaluated(candidate)


def _plan(candidate: Candidate, device: Device) -> Evaluated:
    """Profile and planned cost of a layout; without them for a move that cannot be extrapolated."""
    try:
        cost, samples = planned_cost(candidate, device)
    except ExtrapolationError as error:
        return Evaluated(candidate, unknown=str(error))
    if candidate.number < 0:
        return Evaluated(candidate, cost=cost)
    profile = _sample(candidate, device).profile if samples is None else profile_of(candidate, samples)
    return Evaluated(candidate, profile, cost)
