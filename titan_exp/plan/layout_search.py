"""Layout search: descends along moves from about a dozen seeds, by the costs that `titan-exp plan` predicts.

The gate's rule decides which layouts fit. No neighbour of the fastest fitting layout is faster and fits too, apart from
neighbours that compute or state alone rule out.
"""

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from titan_exp.config.devices import usable_cores
from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.plan import layouts
from titan_exp.plan.devices import Device, room_of
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.extrapolate.schedule import ExtrapolationError
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.predict import predict
from titan_exp.plan.prediction import check_supported
from titan_exp.plan.roofline import pipeline_bubble
from titan_exp.rules import every_rule
from titan_exp.rules.rule import find_violations
from titan_exp.tracking.display import format_bytes

NEARLY_FULL = 0.03
"""Share of the memory that must be left over for the search to skip pipeline ranks in the middle, which need less."""
DESCENTS = 2
CERTAIN = 0.95  # share of a bound by compute or state that holds whatever else a move changes
LONGEST_SCHEDULE = 2**13
"""Maximum number of forward passes (stages times micro-batches) of a simulated schedule; longer ones take seconds."""
_SAME_WORK = (*layouts.DEGREE_KEYS, layouts.SCHEDULE, layouts.MICRO_BATCH)
"""Keys whose moves leave a device's share of the computation unchanged."""
Key = tuple[Any, ...]


@dataclass(frozen=True)
class LayoutCost:
    """Planned cost of a layout."""

    candidate: layouts.Candidate
    step_seconds: float
    bubble: float
    peak_bytes: int  # peak of allocated tensors on the fullest rank
    peak_rank: int
    peak_where: str
    room: int  # device memory without the CUDA context and NCCL's buffers
    reserved: int
    retries: int
    compute: float = 0.0  # seconds of kernels in a step, on the pipeline rank with the least
    state: int = 0  # bytes of parameters and optimizer state on that rank

    @property
    def fits(self) -> bool:
        """True if the gate lets the layout start."""
        return self.reserved <= self.room

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: layouts that fit by time, then the others by memory."""
        return not self.fits, self.step_seconds if self.fits else self.reserved / self.room

    @property
    def priced_rank(self) -> tuple[bool, float]:
        """Sort key: time, multiplied by the share of memory needed if the layout does not fit."""
        return False, self.step_seconds * max(1.0, self.reserved / self.room)

    @property
    def overrides(self) -> str:
        """Overrides of the layout, without degrees of 1."""
        values = self.candidate.values.items()
        return " ".join(
            f"{key}={shown(value)}" for key, value in values if key not in layouts.DEGREE_KEYS or value != 1
        )

    def __str__(self) -> str:
        pressure = ", allocator under pressure" if self.retries else ""
        reserved = f"{format_bytes(self.reserved)} reserved{pressure}"
        return f"{self.tokens_per_second:,.0f} tokens/s/GPU, {reserved}: {self.overrides}"

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        training = self.candidate.experiment.training
        return training.global_batch_size * training.seq_len / self.step_seconds / self.candidate.layout.devices


def planned_cost(candidate: layouts.Candidate, device: Device) -> LayoutCost:
    """Cost of a layout. Raises ExtrapolationError if it cannot be extrapolated."""
    room, degree = room_of(candidate.layout, candidate.spec, device), candidate.parallelism.pp
    # The fullest and the slowest rank are among them: ranks between the second and the last keep fewer micro-batches in
    # flight than the second, and have no more layers.
    extremes = {0, min(1, degree - 1), degree - 1}
    plan = predict(candidate.experiment, device, extremes, cores=1, falls_back=False, evaluates=False)
    ranks = plan.ranks
    if len(ranks) < degree and (1 - NEARLY_FULL) * room < max(rank.bytes for rank in ranks) <= room:
        others = set(range(degree)) - extremes
        ranks += predict(candidate.experiment, device, others, cores=1, falls_back=False, evaluates=False).ranks
    largest = max(ranks, key=lambda rank: rank.bytes)
    assert plan.step_seconds is not None, "the device's rates are known"
    assert largest.allocator is not None, "it is planned for CUDA"
    peak, retries = largest.trace.peak, max(rank.allocator.retries for rank in ranks if rank.allocator is not None)
    compute = min(rank.time.matmuls + rank.time.elementwise for rank in ranks if rank.time is not None)
    kept = min(rank.trace.persistent["parameters"] + rank.trace.persistent["optimizer"] for rank in ranks)
    where = largest.pipeline_rank, peak.where, room
    return LayoutCost(
        candidate, plan.step_seconds, plan.bubble, peak.bytes, *where, largest.bytes, retries, compute, kept
    )


Rank = Callable[[LayoutCost], tuple[bool, float]]


def short_key(key: str) -> str:
    """Last word of a searched key, or its group's name if the key switches the group on."""
    return key.removesuffix(".enabled").rpartition(".")[2]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: list[LayoutCost]  # fastest layouts that fit, fastest first
    front: list[bool]  # True for each row on the Pareto front of speed and memory
    missed: list[LayoutCost]  # planned layouts that do not fit, those that need the least more memory first
    tried: int
    left_out: list[tuple[int, Violation]]
    """Number of tried layouts that break a rule, by key, with an example; most frequent first."""
    planned: int
    too_large: int
    floor: int  # number of layouts whose state alone does not fit
    slower: int
    """Number of layouts left out, because compute alone takes as long as the best step, or the search was stopped."""
    unknown: list[tuple[str, int]]
    seconds: float
    stopped: bool = False
    """True if Ctrl-C, SIGTERM or the time limit ended the search; rows are then the fastest so far."""


class LayoutSearch:
    """Search for the fastest `limit` layouts, with one process per core. `show` is called with progress lines."""

    def __init__(self, space: layouts.SearchSpace, device: Device, limit: int, show: Callable[[str], None]) -> None:
        self._space, self._device, self._limit, self._show = space, device, limit, show
        self._valid: dict[Key, bool] = {}
        """Proposed layouts; True if they can be planned."""
        self._broken: dict[str, list[Violation]] = defaultdict(list)
        self._unknown, self._costs = Counter[str](), dict[Key, LayoutCost]()
        self._large = set[Key]()

    def run(self, seconds: float | None = None, began: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds` after `began`, a time of `time.perf_counter`; Ctrl-C and SIGTERM end it
        early, too. Raises UserError if every layout breaks a rule."""
        began, stopped = time.perf_counter() if began is None else began, False
        with PlannerProcesses(usable_cores()) as pool:
            # A pool that is interrupted while it starts cannot be shut down.
            pool.submit(os.getpid)
            try:
                with interrupt_after(None if seconds is None else began + seconds - time.perf_counter()):
                    seeds = sorted(self._planned(pool, self._seeds()), key=lambda cost: cost.priced_rank)
                    for seed in seeds[:DESCENTS]:
                        # Layouts that are fast and nearly fit lie between slow layouts and those that are fast and fit.
                        priced = self._descend(pool, seed, lambda cost: cost.priced_rank)
                        self._descend(pool, priced, lambda cost: cost.rank)
            except KeyboardInterrupt:
                stopped = True
        rows, costs = self._fastest()[: self._limit], list(self._costs.values())
        front = [all(row.reserved < faster.reserved for faster in rows[:place]) for place, row in enumerate(rows)]
        missed = sorted((cost for cost in costs if not cost.fits), key=lambda cost: cost.reserved - cost.room)
        left_out = [(len(alike), alike[0]) for alike in sorted(self._broken.values(), key=len, reverse=True)]
        floor = len(self._large - self._costs.keys())
        others = sum(self._valid.values()) - len(costs) - floor
        counts = len(costs), sum(not cost.fits for cost in costs), floor, others
        took = time.perf_counter() - began
        unknown = self._unknown.most_common()
        return SearchResult(rows, front, missed, len(self._valid), left_out, *counts, unknown, took, stopped)

    def _seeds(self) -> list[layouts.Candidate]:
        """Valid layouts that are most similar to the seeds of the space. Those that cannot fit recompute in full and
        accumulate no gradients, or are left out if others may fit."""
        for mode in layouts.MODES:
            firsts = (next(filter(self._is_valid, alike), None) for alike in self._space.seeds(mode))
            smaller = (self._smaller(seed) for seed in firsts if seed is not None)
            if found := {seed.identity: seed for seed in smaller}:
                return [seed for seed in found.values() if self._need(seed) <= 1] or [*found.values()]
        if self._unknown:
            return []
        most = [alike[0] for alike in sorted(self._broken.values(), key=len, reverse=True)[:3]]
        raise UserError(
            f"plan search: each of {len(self._valid)} layouts on {self._space.gpus} GPUs breaks a rule. The rules that "
            "most layouts break:",
            most,
        )

    def _smaller(self, seed: layouts.Candidate) -> layouts.Candidate:
        """Variant of a seed that cannot fit: with full recomputation, and with one micro-batch if that needs less."""
        if self._need(seed) <= 1:
            return seed
        layout, fixed = seed.layout, self._space.fixed
        sizes = {layout.micro_batch_size, *([layout.common_share] if layout.parallelism.pp == 1 else [])}
        modes = {seed.mode} if layouts.MODE in fixed else {seed.mode, "full"}
        found = (
            self._space.candidate(layouts.with_values(seed.experiment, {layouts.MODE: mode, layouts.MICRO_BATCH: size}))
            for mode, size in product(modes, {layout.micro_batch_size} if layouts.MICRO_BATCH in fixed else sizes)
        )
        return min(filter(self._is_valid, found), key=self._need, default=seed)

    def _need(self, candidate: layouts.Candidate) -> float:
        return layouts.least_bytes(candidate) / room_of(candidate.layout, candidate.spec, self._device)

    def _is_valid(self, candidate: layouts.Candidate) -> bool:
        known = self._valid.get(candidate.identity)
        if known is None:
            wrong = next(iter(find_violations(every_rule(), candidate.experiment)), None)
            reason = None if wrong is not None else self._reason(candidate)
            known = self._valid[candidate.identity] = wrong is None and reason is None
            if wrong is not None:
                self._broken[wrong.field].append(wrong)
            elif reason is not None:
                self._unknown[reason] += 1
        return known

    def _reason(self, candidate: layouts.Candidate) -> str | None:
        layout = candidate.layout
        if layout.parallelism.pp > 1 and layout.stage_count * layout.gradient_accumulation > LONGEST_SCHEDULE:
            return f"a schedule has more than {LONGEST_SCHEDULE:,} forward passes"
        try:
            check_supported(candidate.experiment, self._device)
        except UserError as error:
            return "; ".join(violation.reason for violation in error.violations)
        return unsupported_reason(candidate.experiment)

    def _descend(self, pool: PlannerProcesses, at: LayoutCost, rank: Rank) -> LayoutCost:
        """Descend from a layout to the first neighbour found with a lower rank, until no neighbour has one."""
        while True:
            near = list(self._near(at))
            lower = [cost for each in near if (cost := self._costs.get(each.identity)) and rank(cost) < rank(at)]
            if not lower:
                planned = self._planned(pool, near, until=lambda cost, at=at: rank(cost) < rank(at))
                lower = [cost for cost in planned if rank(cost) < rank(at)]
            if not lower:
                return at
            at = min(lower, key=rank)

    def _near(self, start: LayoutCost) -> Iterator[layouts.Candidate]:
        """Neighbours of a layout that may be better; those with the same degrees come first."""
        space, recipe = self._space, dict(start.candidate.refined).get(layouts.RECIPE)
        found = list(layouts.moves(start.candidate.experiment, space.fixed, space.recipes, space.run))
        for move in sorted(found, key=lambda move: any(key in layouts.DEGREE_KEYS for key in move.values)):
            if move.direction < 0 if start.fits else move.direction > 0:
                continue
            moved = space.candidate(move.experiment, move.values.get(layouts.RECIPE, recipe))
            if self._is_valid(moved) and (not start.fits or self._may_be_faster(start, move, moved)):
                yield moved

    def _may_be_faster(self, start: LayoutCost, move: layouts.Move, moved: layouts.Candidate) -> bool:
        """False if a move's compute alone takes as long as the best layout's step, or if its state does not fit."""
        if moved.mode != start.candidate.mode or not any(key in _SAME_WORK for key in move.values):
            return True
        own, other = start.candidate.parallelism, moved.parallelism
        if moved.spec is not None and not moved.spec.has_experts:
            shards = [each.dp_shard * each.cp * each.tp * each.pp for each in (own, other)]
            if CERTAIN * start.state * shards[0] / shards[1] > room_of(moved.layout, moved.spec, self._device):
                self._large.add(moved.identity)
                return False
        least = start.compute / (1 - pipeline_bubble(moved.layout))
        return CERTAIN * least < min(start.step_seconds, *(cost.step_seconds for cost in self._fastest()[:1]))

    def _planned(
        self,
        pool: PlannerProcesses,
        candidates: Iterable[layouts.Candidate],
        until: Callable[[LayoutCost], bool] = lambda _: False,
    ) -> Iterator[LayoutCost]:
        """Yield costs of layouts not planned yet, as they come. Once `until` is true for one, no other is begun."""
        queue = [each for each in candidates if each.identity not in self._costs]
        running, over = dict[Future[LayoutCost | str], layouts.Candidate](), False
        while running or (queue and not over):
            while queue and not over and len(running) < usable_cores():
                candidate = queue.pop(0)
                running[pool.submit(_plan, candidate, self._device)] = candidate
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                candidate, cost = running.pop(future), future.result()
                if isinstance(cost, str):
                    self._valid[candidate.identity] = False
                    self._unknown[cost] += 1
                    continue
                self._costs[candidate.identity] = cost
                fastest = "".join(f"; fastest so far: {best}" for best in self._fastest()[:1])
                self._show(f"{len(self._costs)} layouts planned{fastest}")
                over = over or until(cost)
                yield cost

    def _fastest(self) -> list[LayoutCost]:
        """Fastest fitting layouts, fastest first; of layouts that only refine the same base, the fastest."""
        found: dict[Key, LayoutCost] = {}
        for cost in sorted((cost for cost in self._costs.values() if cost.fits), key=lambda cost: cost.step_seconds):
            found.setdefault(cost.candidate.base, cost)
        return list(found.values())


@contextmanager
def interrupt_after(seconds: float | None) -> Iterator[None]:
    """Interrupt the `with` block after `seconds` (None: never), then every second, and at SIGTERM, as Ctrl-C does."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGALRM, signal.SIGTERM)}
    if seconds is not None:
        # The interrupt repeats, since Python ignores one in a finalizer.
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _plan(candidate: layouts.Candidate, device: Device) -> LayoutCost | str:
    try:
        return planned_cost(candidate, device)
    except ExtrapolationError as error:
        return str(error)
