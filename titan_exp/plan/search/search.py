"""Best-first search of layouts: traces those that are estimated to be among the fastest, and the best one's neighbours.

Estimates are scaled from the nearest trace (`estimates.py`); rows are extrapolated from traces of their own.
"""

import gc
import logging
import math
import multiprocessing
import os
import signal
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import stage_sizes, unsupported_reason
from titan_exp.plan.extrapolate.stages import ExtrapolationError
from titan_exp.plan.extrapolate.step_cost import TracedParts, trace_parts
from titan_exp.plan.gate.child_process import end_with_parent
from titan_exp.plan.predict import on_cpu
from titan_exp.plan.search.estimates import Estimates
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.plan.search.layout_cost import LayoutCost, layout_cost
from titan_exp.plan.search.layouts import KEYS, Candidate, SearchSpace, neighbours
from titan_exp.plan.search.profile import profile_of

MEMORY_FRACTION = 0.88
"""Fraction of device memory available to tensors; the rest is for fragmentation, CUDA's context, cuBLAS workspaces and
NCCL buffers. A round number from a few runs on one kind of GPU, not a prediction."""

MUCH_SLOWER = 1.25
"""Neighbours of the fastest layout are extrapolated unless they are estimated to take so many times as long."""

LONGEST_SCHEDULE = 2**13
"""Maximum number of forward passes (stages times micro-batches) of a simulated schedule; longer ones take seconds."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: list[LayoutCost]
    """Fastest layouts that fit, fastest first."""
    front: list[bool]
    """True for each row on the Pareto front of speed and memory."""
    smallest: LayoutCost | None
    """Extrapolated layout with the smallest peak."""
    looked_at: int
    """Number of layouts whose cost was extrapolated."""
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

    `show` is called with progress lines. Without `bounded`, every layout is extrapolated.
    """

    def __init__(
        self, space: SearchSpace, device: Device, limit: int, show: Callable[[str], None], *, bounded: bool = True
    ) -> None:
        self._device, self._limit, self._show, self._bounded = device, limit, show, bounded
        checks = LayoutChecks((_too_long, unsupported_reason), KEYS)
        reasons = [checks.first(candidate.experiment) for candidate in space.candidates]
        self._unknown = Counter(reason for reason in reasons if reason is not None).most_common()
        supported = [each for each, reason in zip(space.candidates, reasons, strict=True) if reason is None]
        self._candidates = [replace(each, number=number) for number, each in enumerate(supported)]
        self._room = device.memory * MEMORY_FRACTION
        self._open = np.ones(len(supported), dtype=bool)
        self._neighbours: npt.NDArray[np.bool_] | None = None
        self._traced: dict[Key, tuple[Candidate, TracedParts]] = {}
        self._costs: list[LayoutCost] = []
        self._fits: list[float] = []

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self._candidates, self._device)

    def run(self, seconds: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds`; Ctrl-C ends it early, too.

        Raises:
            UserError: an option of a layout is not supported.
        """
        began, stopped = time.perf_counter(), False
        cores = len(os.sched_getaffinity(0))
        pool = ProcessPoolExecutor(cores, _forkserver(), _start_worker)
        # A pool that is interrupted while it starts cannot be shut down.
        pool.submit(os.getpid)
        try:
            with interrupt_after(seconds):
                rows = self._search(pool, cores)
        except KeyboardInterrupt:
            rows, stopped = self._fastest()[: self._limit], True
            # Running traces may take a minute.
            for worker in multiprocessing.active_children():
                worker.kill()
        finally:
            pool.shutdown(cancel_futures=True)
        front = [all(row.peak_bytes < faster.peak_bytes for faster in rows[:place]) for place, row in enumerate(rows)]
        too_large = int((self._open & (self._estimates.least_bytes > self._room)).sum()) if self._candidates else 0
        return SearchResult(
            rows,
            front,
            min(self._costs, key=lambda cost: cost.peak_bytes, default=None),
            len(self._costs),
            sum(cost.peak_bytes > self._room for cost in self._costs),
            too_large,
            len(self._candidates) - len(self._costs) - too_large,
            self._unknown,
            len(self._traced),
            time.perf_counter() - began,
            stopped,
        )

    def _search(self, pool: ProcessPoolExecutor, cores: int) -> list[LayoutCost]:
        seeds = self._seeds()
        traces = [pool.submit(_trace, seed) for seed in seeds]
        for future in as_completed(traces):
            self._add_trace(*future.result())
        self._explore(pool, cores)
        best = None
        while self._bounded and self._fits and best is not (best := self._fastest()[0].candidate):
            self._neighbours = np.zeros(len(self._candidates), dtype=bool)
            self._neighbours[[other.number for other in neighbours(best, self._candidates)]] = True
            self._explore(pool, cores)
        if not self._fits and self._open.any():
            # Its peak tells what is missing.
            smallest = self._candidates[int(np.where(self._open, self._estimates.bytes, np.inf).argmin())]
            self._add_trace(*_trace(smallest))
        return self._confirm(pool)

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

    def _add_trace(self, candidate: Candidate, parts: TracedParts) -> None:
        """Use a traced layout for estimates, and extrapolate it."""
        self._traced[_key(candidate)] = candidate, parts
        cost, profile = self._extrapolate(candidate), profile_of(candidate, parts)
        if profile is not None:
            self._estimates.add(profile, cost)
        best = f"; fastest: {self._fastest()[0].tokens_per_second:,.0f} tokens/s/GPU" if self._fits else ""
        self._show(f"{len(self._traced)} profiles traced, {len(self._costs)} layouts extrapolated{best}")

    def _explore(self, pool: ProcessPoolExecutor, cores: int) -> None:
        """Extrapolate layouts in the order of their estimates until no other can enter the rows."""
        waiting: dict[Key, list[Candidate]] = {}
        running = set[Future[tuple[Candidate, TracedParts]]]()
        while True:
            later: list[Candidate] = []
            # Layouts with better estimates may suffice: wait for their traces before tracing slower ones.
            while len(running) < cores and not (running and self._enough([*waiting.values(), later])):
                candidate = self._next()
                if candidate is None:
                    break
                key = _key(candidate)
                if key in self._traced:
                    self._extrapolate(candidate)
                    continue
                self._open[candidate.number] = False
                if key in waiting:
                    waiting[key].append(candidate)
                elif any(_without_sharding(key) == _without_sharding(other) for other in waiting):
                    # A running trace will tell more about it.
                    later.append(candidate)
                else:
                    waiting[key] = [candidate]
                    running.add(pool.submit(_trace, candidate))
            for candidate in later:
                self._open[candidate.number] = True
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                traced, parts = future.result()
                self._add_trace(traced, parts)
                for candidate in waiting.pop(_key(traced)):
                    if candidate.number != traced.number:
                        self._open[candidate.number] = True

    def _enough(self, waiting: Iterable[Collection[Candidate]]) -> bool:
        """True if the rows would be complete if every pending layout fit."""
        return len(self._fits) + sum(map(len, waiting)) >= self._limit > len(self._fits)

    def _next(self) -> Candidate | None:
        """Layout with the best estimate that may still enter the rows, or be faster than its neighbour, or None."""
        if not self._candidates:
            return None
        estimates, allowed = self._estimates, self._open
        if self._bounded:
            allowed = allowed & (estimates.least_bytes <= self._room)
            if self._neighbours is None:
                allowed &= estimates.least_seconds <= self._slowest_row()
            else:
                allowed &= self._neighbours & (estimates.seconds <= MUCH_SLOWER * self._fits[0])
        number = int(np.where(allowed, estimates.seconds, np.inf).argmin())
        return self._candidates[number] if allowed[number] else None

    def _slowest_row(self) -> float:
        """Step seconds of the current last row."""
        return self._fits[self._limit - 1] if len(self._fits) >= self._limit else math.inf

    def _extrapolate(self, candidate: Candidate) -> LayoutCost:
        cost = layout_cost(candidate, *self._traced[_key(candidate)], self._device)
        self._open[candidate.number] = False
        self._costs.append(cost)
        if cost.peak_bytes <= self._room:
            insort(self._fits, cost.step_seconds)
        return cost

    def _fastest(self) -> list[LayoutCost]:
        """Extrapolated layouts that fit, fastest first."""
        fits = [cost for cost in self._costs if cost.peak_bytes <= self._room]
        return sorted(fits, key=lambda cost: cost.step_seconds)

    def _confirm(self, pool: ProcessPoolExecutor) -> list[LayoutCost]:
        """Fastest layouts that fit when extrapolated from traces with their own number of shards."""
        rows, costs = list[LayoutCost](), self._fastest()
        while costs and len(rows) < self._limit:
            wave, costs = costs[: self._limit - len(rows)], costs[self._limit - len(rows) :]
            exact, by_profile = list[LayoutCost](), dict[Key, list[LayoutCost]]()
            for cost in wave:
                candidate = cost.candidate
                if _shards(candidate) == _shards(self._traced[_key(candidate)][0]):
                    exact.append(cost)
                else:
                    by_profile.setdefault((*_key(candidate), *_shards(candidate)), []).append(cost)
            self._show(f"tracing the fastest that fit with their own number of shards: {len(by_profile)} profiles")
            retraced = pool.map(_extrapolate_exactly, [(group, self._device) for group in by_profile.values()])
            exact = [cost for group in retraced for cost in group] + exact
            rows += [cost for cost in exact if cost.peak_bytes <= self._room]
        return sorted(rows, key=lambda row: row.step_seconds)


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
    """Cache key of a profile; the number of shards only divides persistent bytes."""
    parallelism, layout = candidate.parallelism, candidate.layout
    pipeline = parallelism.pp > 1
    return (
        parallelism.tp,
        parallelism.cp,
        candidate.experts,
        candidate.mode,
        layout.micro_batch_size,
        pipeline,
        frozenset(stage_sizes(candidate.experiment)),
        None if pipeline else min(layout.gradient_accumulation, 3),
        parallelism.dp_shard > 1,
        parallelism.dp_replicate > 1,
    )


def _without_sharding(key: Key) -> Key:
    return key[:-2]


def _too_long(experiment: Experiment) -> str | None:
    layout = ResolvedLayout.of(experiment)
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


def _forkserver() -> Any:
    """Multiprocessing context that forks workers from a process with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker() -> None:
    """Silence the log of model builds."""
    end_with_parent()
    # The parent handles Ctrl-C, which reaches all processes of a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.INFO)


def _trace(candidate: Candidate) -> tuple[Candidate, TracedParts]:
    experiment = candidate.experiment
    try:
        parts = trace_parts(on_cpu(experiment), cuda=device_type(experiment.cluster) == "cuda")
    except ExtrapolationError as error:
        raise UserError(f"plan search: {error}. titan-exp plan predicts one layout.") from error
    _freeze_imports()
    return candidate, parts


@cache
def _freeze_imports() -> None:
    """Exempt what the first trace imports from garbage collection, which slows every trace."""
    gc.freeze()


def _shards(candidate: Candidate) -> tuple[int, int]:
    return candidate.parallelism.dp_replicate, candidate.parallelism.dp_shard


def _extrapolate_exactly(given: tuple[list[LayoutCost], Device]) -> list[LayoutCost]:
    """Costs of layouts with one profile, from a trace with their own number of shards."""
    costs, device = given
    sampled, parts = _trace(costs[0].candidate)
    return [layout_cost(cost.candidate, sampled, parts, device) for cost in costs]
