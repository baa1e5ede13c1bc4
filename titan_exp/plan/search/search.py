"""All layouts of a cluster, the fastest that fit first: a bound for each, and the traces that the best of them need.

A layout is looked at only while its bounds say that it may fit and be among the fastest. They come from traces of other
layouts, with a margin (`plan/least.py`), and are held against looking at everything by tests.
"""

import gc
import heapq
import logging
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.machine.devices import device_type
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.extrapolate.step_cost import TracedParts, trace_parts
from titan_exp.plan.gate.child_process import end_with_parent
from titan_exp.plan.predict import on_cpu
from titan_exp.plan.search.layout_cost import LayoutCost, layout_cost, peak_lower_bound
from titan_exp.plan.search.layouts import MODES, SearchSpace
from titan_exp.plan.search.lower_bounds import LowerBounds, profile_of

HEADROOM = 0.88
"""Of a device's memory, what tensors may fill: the rest is for what the allocator reserves beyond them, CUDA's context,
cuBLAS's workspaces and NCCL's buffers. A round number from a few runs on one kind of GPU, not a prediction."""

LONGEST_SCHEDULE = 2**13
"""Stages times micro-batches of the longest schedule that is gone through; longer ones take many seconds each."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class SearchResult:
    """What a search has come to."""

    rows: list[LayoutCost]
    """The fastest layouts that fit, fastest first."""
    front: list[bool]
    """Of each, whether no faster layout takes less memory."""
    smallest: LayoutCost | None
    """Of the layouts that were looked at, that of the least memory."""
    looked_at: int
    """Layouts whose step was put together from traces."""
    too_large: int
    """Those of them that do not fit."""
    floor: int
    """Layouts left out because what they hold at least does not fit."""
    slower: int
    """Layouts left out because what they take at least is longer than the last row."""
    unknown: list[tuple[str, int]]
    """Layouts left out because layers or micro-batches cannot be traced once, by the reason."""
    traces: int
    """Distinct profiles that were traced."""
    seconds: float
    """What it took."""


class LayoutSearch:
    """A search over candidates, by as many processes as there are cores.

    Args:
        found: the candidates.
        device: what they run on.
        limit: how many rows are wanted.
        tell: is told how it goes, in words.
        bounded: whether what cannot be among the rows is left out; otherwise everything is looked at.
    """

    def __init__(
        self, found: SearchSpace, device: Device, limit: int, tell: Callable[[str], None], *, bounded: bool = True
    ) -> None:
        self._device, self._limit, self._tell, self._bounded = device, limit, tell, bounded
        reasons = [_too_long(its) or unsupported_reason(its) for its in found.experiments]
        self._unknown = Counter(reason for reason in reasons if reason is not None).most_common()
        self._all = [its for its, reason in zip(found.experiments, reasons, strict=True) if reason is None]
        self._numbers = {id(its): number for number, its in enumerate(self._all)}
        self._room = device.memory_gb * 1e9 * HEADROOM
        self._bounds = LowerBounds(device)
        self._left: list[tuple[float, int]] = []
        self._traced: dict[Key, tuple[Experiment, TracedParts]] = {}
        self._guesses: list[LayoutCost] = []
        self._floor = 0
        self._slack: tuple[float, Experiment] | None = None

    def run(self) -> SearchResult:
        """Search.

        Raises:
            UserError: something of a layout is not modelled.
        """
        began = time.perf_counter()
        cores = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(cores, _processes(), _quiet) as pool:
            for future in [pool.submit(_traced, its) for its in self._seeds()]:
                self._add(*future.result())
            self._left = [(self._bounds.of(its).seconds, number) for number, its in enumerate(self._all)]
            heapq.heapify(self._left)
            self._look(pool, cores)
            if not self._guesses and self._slack is not None:
                self._add(*_traced(self._slack[1]))
                self._guess(self._slack[1])
            rows = self._confirm(pool)
        front = [all(row.peak_bytes < faster.peak_bytes for faster in rows[:place]) for place, row in enumerate(rows)]
        return SearchResult(
            rows,
            front,
            min(self._guesses, key=lambda guess: guess.peak_bytes, default=None),
            len(self._guesses),
            sum(guess.peak_bytes > self._room for guess in self._guesses),
            self._floor,
            len(self._left),
            self._unknown,
            len(self._traced),
            time.perf_counter() - began,
        )

    def _seeds(self) -> list[Experiment]:
        """Layouts whose traces tell something of all others: of every way of recomputation, micro-batches of one
        sequence and of many; of two ranks that share a sequence, whose messages are not also those of sharding; and of
        one without a pipeline.
        """
        seeds: dict[Key, Experiment] = {}

        def add(layouts: list[Experiment]) -> None:
            if layouts:
                its = min(layouts, key=_simplicity)
                seeds.setdefault(_key(its), its)

        for mode in MODES:
            alike = [its for its in self._all if its.activation_checkpoint.mode == mode]
            sizes = {ResolvedLayout.of(its).micro_batch_size for its in alike}
            for size in sorted({min(sizes), max(sizes)} if sizes else ()):
                add([its for its in alike if ResolvedLayout.of(its).micro_batch_size == size])
        shared = [its for its in self._all if its.parallelism.cp > 1 and its.parallelism.dp_shard > 1]
        fewest = min((its.parallelism.cp for its in shared), default=0)
        add([its for its in shared if its.parallelism.cp == fewest])
        add([its for its in self._all if its.parallelism.pp == 1 and its.parallelism.dp_shard > 1])
        return list(seeds.values())

    def _add(self, experiment: Experiment, parts: TracedParts) -> None:
        self._traced[_key(experiment)] = experiment, parts
        profile = profile_of(experiment, parts)
        if profile is not None:
            self._bounds.add(profile)
        self._tell(f"{len(self._traced)} profiles traced, {len(self._guesses)} layouts looked at")

    def _look(self, pool: ProcessPoolExecutor, cores: int) -> None:
        """Look at layouts, those with the best bounds first, until no other can be among the fastest."""
        waiting: dict[Key, list[Experiment]] = {}
        running = set[Future[tuple[Experiment, TracedParts]]]()
        while True:
            later: list[Experiment] = []
            # What is faster by its bound may suffice: better to wait for it than to trace what is slower.
            while len(running) < cores and not (running and self._suffice([*waiting.values(), later])):
                its = self._next()
                if its is None:
                    break
                key = _key(its)
                if key in self._traced:
                    self._guess(its)
                elif key in waiting:
                    waiting[key].append(its)
                elif any(_alike(key) == _alike(other) for other in waiting):
                    # What is being traced will tell more of it.
                    later.append(its)
                else:
                    waiting[key] = [its]
                    running.add(pool.submit(_traced, its))
            for its in later:
                heapq.heappush(self._left, (self._bounds.of(its).seconds, self._numbers[id(its)]))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                experiment, parts = future.result()
                self._add(experiment, parts)
                for its in waiting.pop(_key(experiment)):
                    self._guess(its)

    def _suffice(self, waiting: Iterable[Collection[Experiment]]) -> bool:
        """Whether there were enough rows if all that is waited for did fit."""
        fit = sum(guess.peak_bytes <= self._room for guess in self._guesses)
        return fit + sum(map(len, waiting)) >= self._limit > fit

    def _next(self) -> Experiment | None:
        """Of the layouts that are left and may be among the fastest, that of the best bound; None where none is."""
        while self._left and (not self._bounded or self._left[0][0] <= self._worst()):
            before, number = heapq.heappop(self._left)
            its = self._all[number]
            if not self._bounded:
                return its
            # More may be known by now, and then other layouts have better bounds.
            least = self._bounds.of(its)
            if least.bytes <= self._room and least.seconds > before * (1 + 1e-9):
                heapq.heappush(self._left, (least.seconds, number))
                continue
            held = least.bytes if least.bytes > self._room else self._least_peak(its)
            if held <= self._room:
                return its
            self._floor += 1
            if self._slack is None or held < self._slack[0]:
                self._slack = held, its
        return None

    def _least_peak(self, experiment: Experiment) -> float:
        """Bytes that a layout holds at least, by the profile that is nearest to its own."""
        if _key(experiment) in self._traced:
            return 0.0
        near = [(_distance(sampled, experiment), key) for key, (sampled, _) in self._traced.items()]
        distance, key = min(near, key=lambda its: its[0], default=(math.inf, None))
        if key is None or distance == math.inf:
            return 0.0
        return peak_lower_bound(experiment, *self._traced[key])

    def _worst(self) -> float:
        """Seconds of the last row as it is now."""
        fits = sorted(guess.step_seconds for guess in self._guesses if guess.peak_bytes <= self._room)
        return fits[self._limit - 1] if len(fits) >= self._limit else math.inf

    def _guess(self, experiment: Experiment) -> None:
        self._guesses.append(layout_cost(experiment, *self._traced[_key(experiment)], self._device))

    def _confirm(self, pool: ProcessPoolExecutor) -> list[LayoutCost]:
        """Of the fastest, the layouts that fit when they are put together from traces of their own degrees."""
        rows = list[LayoutCost]()
        guesses = sorted(self._guesses, key=lambda guess: guess.step_seconds)
        guesses = [guess for guess in guesses if guess.peak_bytes <= self._room]
        while guesses and len(rows) < self._limit:
            wave, guesses = guesses[: self._limit - len(rows)], guesses[self._limit - len(rows) :]
            by_profile: dict[Key, list[LayoutCost]] = {}
            for its in wave:
                sampled = _shards(self._traced[_key(its.experiment)][0])
                if _shards(its.experiment) != sampled:
                    by_profile.setdefault((*_key(its.experiment), *_shards(its.experiment)), []).append(its)
            self._tell(f"tracing the fastest that fit with their own number of shards: {len(by_profile)} profiles")
            exact = [
                its
                for group in pool.map(_exactly, [(its, self._device) for its in by_profile.values()])
                for its in group
            ]
            known = {id(its.experiment) for group in by_profile.values() for its in group}
            exact += [its for its in wave if id(its.experiment) not in known]
            rows += [its for its in exact if its.peak_bytes <= self._room]
        return sorted(rows, key=lambda row: row.step_seconds)


def _simplicity(experiment: Experiment) -> tuple[object, ...]:
    parallelism = experiment.parallelism
    mode, pipeline = experiment.activation_checkpoint.mode, parallelism.pp > 1
    return (
        not pipeline,
        mode != "none",
        parallelism.cp,
        # One that sends messages, where there is one.
        parallelism.tp == 1,
        parallelism.tp,
        ResolvedLayout.of(experiment).micro_batch_size,
        parallelism.pp,
    )


def _key(experiment: Experiment) -> Key:
    """What a profile depends on; the number of shards only divides what is kept."""
    parallelism = experiment.parallelism
    piped = parallelism.pp > 1
    layout = ResolvedLayout.of(experiment)
    return (
        parallelism.tp,
        parallelism.cp,
        experiment.activation_checkpoint.mode,
        layout.micro_batch_size,
        piped,
        frozenset(count == 1 for count in layout.layer_counts) if piped else None,
        None if piped else min(layout.gradient_accumulation, 3),
        parallelism.dp_shard > 1,
        parallelism.dp_replicate > 1,
    )


def _distance(sampled: Experiment, experiment: Experiment) -> float:
    """How much smaller the degrees of a profile are; infinite where it tells nothing of a layout's memory."""
    there, own = sampled.parallelism, experiment.parallelism
    sizes = ResolvedLayout.of(sampled).micro_batch_size, ResolvedLayout.of(experiment).micro_batch_size
    few = [min(ResolvedLayout.of(its).gradient_accumulation, 3) for its in (sampled, experiment)]
    if (
        sampled.activation_checkpoint.mode != experiment.activation_checkpoint.mode
        or (there.pp > 1) != (own.pp > 1)
        or (own.pp == 1 and few[0] != few[1])
        or there.tp > own.tp
        or there.cp > own.cp
        or sizes[0] < sizes[1]
        or (sizes[1] == 1 and sizes[0] > 1)
        # What is not sharded is not gathered either.
        or (there.dp_shard * there.cp == 1) != (own.dp_shard * own.cp == 1)
    ):
        return math.inf
    return own.tp / there.tp * own.cp / there.cp * max(sizes) / min(sizes)


def _alike(key: Key) -> Key:
    """A profile, whatever parameters are sharded and replicated over."""
    return key[:-2]


def _too_long(experiment: Experiment) -> str | None:
    layout = ResolvedLayout.of(experiment)
    if experiment.parallelism.pp == 1 or layout.stage_count * layout.gradient_accumulation <= LONGEST_SCHEDULE:
        return None
    return f"their schedules have more than {LONGEST_SCHEDULE:,} forward passes"


def _processes() -> Any:
    """Processes that are forked from one that has imported torch, and does nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _quiet() -> None:
    """Once in each process: no words about every model that is built, and what is imported is not looked at as garbage
    before every trace, which would take longer than many of them."""
    end_with_parent()
    logging.disable(logging.INFO)
    gc.freeze()


def _traced(experiment: Experiment) -> tuple[Experiment, TracedParts]:
    return experiment, trace_parts(on_cpu(experiment), cuda=device_type(experiment.cluster) == "cuda")


def _shards(experiment: Experiment) -> tuple[int, int]:
    return experiment.parallelism.dp_replicate, experiment.parallelism.dp_shard


def _exactly(given: tuple[list[LayoutCost], Device]) -> list[LayoutCost]:
    """Layouts of one profile anew, from a trace with their own number of shards."""
    plans, device = given
    sampled = plans[0].experiment
    _, parts = _traced(sampled)
    return [layout_cost(its.experiment, sampled, parts, device) for its in plans]
