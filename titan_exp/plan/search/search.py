"""Branch-and-bound search of layouts: traces only layouts whose lower bounds are competitive.

Bounds are scaled from traces of other layouts, with a margin (`lower_bounds.py`); tests compare with an exhaustive
search.
"""

import gc
import heapq
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
from dataclasses import dataclass
from functools import cache
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import sampled_stages, unsupported_reason
from titan_exp.plan.extrapolate.step_cost import TracedParts, trace_parts
from titan_exp.plan.gate.child_process import end_with_parent
from titan_exp.plan.predict import on_cpu
from titan_exp.plan.search.comparable import has_more_experts
from titan_exp.plan.search.layout_checks import LayoutChecks
from titan_exp.plan.search.layout_cost import LayoutCost, layout_cost, peak_lower_bound
from titan_exp.plan.search.layouts import KEYS, MODES, Candidate, SearchSpace
from titan_exp.plan.search.lower_bounds import LowerBounds
from titan_exp.plan.search.profile import profile_of

MEMORY_FRACTION = 0.88
"""Fraction of device memory available to tensors; the rest is for fragmentation, CUDA's context, cuBLAS workspaces and
NCCL buffers. A round number from a few runs on one kind of GPU, not a prediction."""

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
    """Layouts pruned because their lower bound of memory does not fit."""
    slower: int
    """Layouts pruned because their lower bound of time exceeds the last row."""
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

    `show` is called with progress lines. Without `bounded`, no layout is pruned.
    """

    def __init__(
        self, space: SearchSpace, device: Device, limit: int, show: Callable[[str], None], *, bounded: bool = True
    ) -> None:
        self._device, self._limit, self._show, self._bounded = device, limit, show, bounded
        checks = LayoutChecks((_too_long, unsupported_reason), KEYS)
        reasons = [checks.first(candidate.experiment) for candidate in space.candidates]
        self._unknown = Counter(reason for reason in reasons if reason is not None).most_common()
        supported = zip(space.candidates, reasons, strict=True)
        self._candidates = {candidate.number: candidate for candidate, reason in supported if reason is None}
        self._room = device.memory * MEMORY_FRACTION
        self._bounds = LowerBounds(device)
        self._queue: list[tuple[float, int, int]] = []
        self._traced: dict[Key, tuple[Candidate, TracedParts]] = {}
        self._costs: list[LayoutCost] = []
        self._fits: list[float] = []
        self._floor = 0
        self._smallest_bound: tuple[float, Candidate] | None = None

    def run(self, seconds: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds`; Ctrl-C ends it early, too.

        Raises:
            UserError: an option of a layout is not supported.
        """
        began, stopped = time.perf_counter(), False
        cores = len(os.sched_getaffinity(0))
        pool = ProcessPoolExecutor(cores, _forkserver(), _start_worker)
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
        return SearchResult(
            rows,
            front,
            min(self._costs, key=lambda cost: cost.peak_bytes, default=None),
            len(self._costs),
            sum(cost.peak_bytes > self._room for cost in self._costs),
            self._floor,
            len(self._candidates) - len(self._costs) - self._floor,
            self._unknown,
            len(self._traced),
            time.perf_counter() - began,
            stopped,
        )

    def _search(self, pool: ProcessPoolExecutor, cores: int) -> list[LayoutCost]:
        seeds = self._seeds()
        for future in as_completed([pool.submit(_trace, seed) for seed in seeds]):
            seed, parts = future.result()
            self._add_trace(seed, parts)
            self._extrapolate(seed)
        known = {seed.number for seed in seeds}
        self._queue = [self._entry(candidate) for number, candidate in self._candidates.items() if number not in known]
        heapq.heapify(self._queue)
        self._explore(pool, cores)
        if not self._fits and self._smallest_bound is not None:
            # Its peak tells what is missing.
            self._add_trace(*_trace(self._smallest_bound[1]))
            self._extrapolate(self._smallest_bound[1])
        return self._confirm(pool)

    def _seeds(self) -> list[Candidate]:
        """Layouts whose traces give bounds for all others.

        For every mode of activation checkpointing the smallest and the largest micro-batch; the smallest context
        parallelism together with sharding, whose messages are counted separately; and both sizes without a pipeline.
        """
        every, groups = list(self._candidates.values()), list[list[Candidate]]()
        for mode in reversed(MODES):  # the least memory first
            of_mode = [candidate for candidate in every if candidate.mode == mode]
            sizes = {candidate.layout.micro_batch_size for candidate in of_mode}
            for size in sorted({min(sizes), max(sizes)} if sizes else ()):
                groups.append([candidate for candidate in of_mode if candidate.layout.micro_batch_size == size])
        sharded = [candidate for candidate in every if candidate.parallelism.dp_shard > 1]
        smallest = min((degree for candidate in sharded if (degree := candidate.parallelism.cp) > 1), default=0)
        groups.append([candidate for candidate in sharded if candidate.parallelism.cp == smallest])
        whole = [candidate for candidate in sharded if candidate.parallelism.pp == 1]
        for size in {
            choose(candidate.layout.micro_batch_size for candidate in whole) for choose in (min, max) if whole
        }:
            groups.append([candidate for candidate in whole if candidate.layout.micro_batch_size == size])
        seeds: dict[Key, Candidate] = {}
        for group in filter(None, groups):
            simplest = min(group, key=_simplicity)
            seeds.setdefault(_key(simplest), simplest)
        return list(seeds.values())

    def _add_trace(self, candidate: Candidate, parts: TracedParts) -> None:
        self._traced[_key(candidate)] = candidate, parts
        profile = profile_of(candidate, parts)
        if profile is not None:
            self._bounds.add(profile)
        best = f"; fastest: {self._fastest()[0].tokens_per_second:,.0f} tokens/s/GPU" if self._fits else ""
        self._show(f"{len(self._traced)} profiles traced, {len(self._costs)} layouts extrapolated{best}")

    def _explore(self, pool: ProcessPoolExecutor, cores: int) -> None:
        """Extrapolate layouts in the order of their bounds until no other can enter the rows."""
        waiting: dict[Key, list[Candidate]] = {}
        running = set[Future[tuple[Candidate, TracedParts]]]()
        while True:
            later: list[Candidate] = []
            # Layouts with better bounds may suffice: wait for their traces before tracing slower ones.
            while len(running) < cores and not (running and self._enough([*waiting.values(), later])):
                candidate = self._next()
                if candidate is None:
                    break
                key = _key(candidate)
                if key in self._traced:
                    self._extrapolate(candidate)
                elif key in waiting:
                    waiting[key].append(candidate)
                elif any(_without_sharding(key) == _without_sharding(other) for other in waiting):
                    # A running trace will raise its bound.
                    later.append(candidate)
                else:
                    waiting[key] = [candidate]
                    running.add(pool.submit(_trace, candidate))
            for candidate in later:
                heapq.heappush(self._queue, self._entry(candidate))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                traced, parts = future.result()
                self._add_trace(traced, parts)
                for candidate in waiting.pop(_key(traced)):
                    self._extrapolate(candidate)

    def _entry(self, candidate: Candidate) -> tuple[float, int, int]:
        """Queue entry. Of equal bounds large micro-batches come first, whose traces bound smaller ones."""
        return self._bounds.of(candidate).seconds, -candidate.layout.micro_batch_size, candidate.number

    def _enough(self, waiting: Iterable[Collection[Candidate]]) -> bool:
        """True if the rows would be complete if every pending layout fit."""
        return len(self._fits) + sum(map(len, waiting)) >= self._limit > len(self._fits)

    def _next(self) -> Candidate | None:
        """Queued layout with the best bound that may still enter the rows, or None."""
        while self._queue and (not self._bounded or self._queue[0][0] <= self._slowest_row()):
            before, _, number = heapq.heappop(self._queue)
            candidate = self._candidates[number]
            if not self._bounded:
                return candidate
            # New profiles may have raised the bound, so that another layout is the best.
            bound = self._bounds.of(candidate)
            if bound.bytes <= self._room and bound.seconds > before * (1 + 1e-9):
                heapq.heappush(self._queue, self._entry(candidate))
                continue
            peak = bound.bytes if bound.bytes > self._room else self._peak_lower_bound(candidate)
            if peak <= self._room:
                return candidate
            self._floor += 1
            if self._smallest_bound is None or peak < self._smallest_bound[0]:
                self._smallest_bound = peak, candidate
        return None

    def _peak_lower_bound(self, candidate: Candidate) -> float:
        """Lower bound of a layout's peak, from the nearest traced layout."""
        if _key(candidate) in self._traced:
            return 0.0
        near = [(_distance(sampled, candidate), key) for key, (sampled, _) in self._traced.items()]
        distance, key = min(near, key=lambda entry: entry[0], default=(math.inf, None))
        if key is None or distance == math.inf:
            return 0.0
        return peak_lower_bound(candidate, *self._traced[key]) + 2 * self._device.matmul_workspace

    def _slowest_row(self) -> float:
        """Step seconds of the current last row."""
        return self._fits[self._limit - 1] if len(self._fits) >= self._limit else math.inf

    def _extrapolate(self, candidate: Candidate) -> None:
        cost = layout_cost(candidate, *self._traced[_key(candidate)], self._device)
        self._costs.append(cost)
        if cost.peak_bytes <= self._room:
            insort(self._fits, cost.step_seconds)

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
    parallelism = candidate.parallelism
    return (
        parallelism.pp == 1,
        candidate.mode != "none",
        parallelism.cp,
        # Layouts with fewer experts per rank give bounds for those with more.
        -parallelism.ep,
        parallelism.etp,
        # A layout with tensor-parallel messages comes first.
        parallelism.tp == 1,
        parallelism.tp,
        candidate.layout.micro_batch_size,
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
        frozenset(count == 1 for count in layout.layer_counts) if pipeline else None,
        sampled_stages(candidate.experiment)[0] if pipeline else None,
        None if pipeline else min(layout.gradient_accumulation, 3),
        parallelism.dp_shard > 1,
        parallelism.dp_replicate > 1,
    )


def _distance(sampled: Candidate, candidate: Candidate) -> float:
    """Factor by which a traced layout's degrees are smaller; infinite if it gives no memory bound."""
    other, own = sampled.parallelism, candidate.parallelism
    sizes = sampled.layout.micro_batch_size, candidate.layout.micro_batch_size
    micro_batches = [min(layout.gradient_accumulation, 3) for layout in (sampled.layout, candidate.layout)]
    if (
        sampled.mode != candidate.mode
        or not has_more_experts(sampled, candidate)
        or (other.pp > 1) != (own.pp > 1)
        or (own.pp == 1 and micro_batches[0] != micro_batches[1])
        or other.tp > own.tp
        or other.cp > own.cp
        or sizes[0] < sizes[1]
        or (sizes[1] == 1 and sizes[0] > 1)
        # Unsharded parameters are never gathered.
        or (sampled.shards == 1) != (candidate.shards == 1)
        or sampled.has_one_data_rank != candidate.has_one_data_rank
    ):
        return math.inf
    experts = other.ep * other.etp / own.ep / own.etp
    return own.tp / other.tp * own.cp / other.cp * experts * max(sizes) / min(sizes)


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
    parts = trace_parts(on_cpu(experiment), cuda=device_type(experiment.cluster) == "cuda")
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
