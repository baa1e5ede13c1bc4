"""Search of layouts: descent along moves from about a dozen seeds, by the costs that `titan-exp plan` predicts.

The gate's rule decides which layouts fit. The fastest one that fits has no neighbour that is faster and fits, and whose
compute or state alone does not speak against it.
"""

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.machine.devices import usable_cores
from titan_exp.plan.cuda.devices import Device, room_of
from titan_exp.plan.extrapolate.eligibility import unsupported_reason
from titan_exp.plan.extrapolate.schedule import ExtrapolationError
from titan_exp.plan.planner_processes import PlannerProcesses
from titan_exp.plan.predict import predict
from titan_exp.plan.roofline import pipeline_bubble
from titan_exp.plan.search.layouts import (
    DEGREE_KEYS,
    MICRO_BATCH,
    MODES,
    RECIPE,
    SCHEDULE,
    Candidate,
    Move,
    SearchSpace,
    moves,
)
from titan_exp.plan.supported import check_supported
from titan_exp.rules import EVERY_RULE
from titan_exp.rules.rule import find_violations
from titan_exp.tracking.number_format import format_bytes

NEARLY_FULL = 0.03
"""Share of the room that must be left for pipeline ranks in the middle not to be planned, which need less."""
DESCENTS = 2
"""Number of seeds from which the search descends."""
CERTAIN = 0.95
"""Share of a bound by compute or state that holds whatever else a move changes."""
LONGEST_SCHEDULE = 2**13
"""Maximum number of forward passes (stages times micro-batches) of a simulated schedule; longer ones take seconds."""

_SAME_WORK = (*DEGREE_KEYS, SCHEDULE, MICRO_BATCH)
"""Keys whose moves leave a device's share of the computation as it is."""
Key = tuple[Any, ...]


@dataclass(frozen=True)
class LayoutCost:
    """Planned cost of a layout."""

    candidate: Candidate
    step_seconds: float
    bubble: float
    peak_bytes: int
    """Peak of allocated tensors on the fullest rank."""
    peak_rank: int
    peak_where: str
    """Phase of the peak, e.g. `forward, block 3`."""
    room: int
    """Device memory without the CUDA context and NCCL's buffers."""
    reserved: int
    """Peak of the allocator's reserved memory."""
    retries: int
    """Allocations that find the device full and give cached memory back."""
    compute: float = 0.0
    """Seconds of kernels in a step, on the pipeline rank with the least."""
    state: int = 0
    """Bytes of parameters and optimizer state on that rank."""

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
        """Sort key: time, multiplied by the share of the memory that it needs, where it does not fit."""
        return False, self.step_seconds * max(1.0, self.reserved / self.room)

    def __str__(self) -> str:
        values = (f"{short_key(key)}={shown(value)}" for key, value in self.candidate.values.items())
        degrees = " ".join(value for value in values if not value.endswith("=1"))
        return f"{self.tokens_per_second:,.0f} tokens/s/GPU, {format_bytes(self.reserved)} reserved: {degrees}"

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        training = self.candidate.experiment.training
        return training.global_batch_size * training.seq_len / self.step_seconds / self.candidate.layout.devices


def planned_cost(candidate: Candidate, device: Device) -> LayoutCost:
    """Cost of a layout. Raises ExtrapolationError if it cannot be extrapolated."""
    room, degree = room_of(candidate.layout, candidate.spec, device), candidate.parallelism.pp
    # The fullest and the slowest rank are among them: those between the second and the last keep fewer micro-batches in
    # flight than the second, and have no more layers.
    extremes = {0, min(1, degree - 1), degree - 1}
    plan = predict(candidate.experiment, device, extremes, cores=1, falls_back=False)
    ranks = plan.ranks
    if len(ranks) < degree and (1 - NEARLY_FULL) * room < max(rank.bytes for rank in ranks) <= room:
        others = set(range(degree)) - extremes
        ranks += predict(candidate.experiment, device, others, cores=1, falls_back=False).ranks
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
    """Last word of a searched key, or its group if that is switched on."""
    return key.removesuffix(".enabled").rpartition(".")[2]


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    rows: list[LayoutCost]
    """Fastest layouts that fit, fastest first."""
    front: list[bool]
    """True for each row on the Pareto front of speed and memory."""
    smallest: LayoutCost | None
    """Planned layout that needs the least memory."""
    tried: int
    """Number of layouts that were seeds or neighbours."""
    left_out: list[tuple[int, Violation]]
    """Number of these that break a rule by key, with an example, the most frequent first."""
    planned: int
    """Number of planned layouts."""
    too_large: int
    """Number of these layouts that do not fit."""
    floor: int
    """Layouts whose state alone does not fit."""
    slower: int
    """Layouts that are not planned: their compute alone takes as long as the best, or the search was stopped."""
    unknown: list[tuple[str, int]]
    """Layouts that cannot be extrapolated, counted by reason."""
    seconds: float
    stopped: bool = False
    """True if Ctrl-C or the time limit ended the search: rows are the fastest so far."""


class LayoutSearch:
    """Search for the fastest `limit` layouts, with one process per core.

    `show` is called with progress lines.
    """

    def __init__(self, space: SearchSpace, device: Device, limit: int, show: Callable[[str], None]) -> None:
        self._space, self._device, self._limit, self._show = space, device, limit, show
        self._valid: dict[Key, bool] = {}
        """Layouts that were proposed, and whether they can be planned."""
        self._broken: dict[str, list[Violation]] = defaultdict(list)
        self._unknown, self._costs = Counter[str](), dict[Key, LayoutCost]()
        self._large = set[Key]()

    def run(self, seconds: float | None = None) -> SearchResult:
        """Run the search, for up to `seconds`; Ctrl-C ends it early, too. Raises UserError if every layout breaks a
        rule."""
        began, stopped = time.perf_counter(), False
        with PlannerProcesses(usable_cores()) as pool:
            # A pool that is interrupted while it starts cannot be shut down.
            pool.submit(os.getpid)
            try:
                with interrupt_after(seconds):
                    self._search(pool)
            except KeyboardInterrupt:
                stopped = True
        rows, costs = self._fastest()[: self._limit], list(self._costs.values())
        front = [all(row.reserved < faster.reserved for faster in rows[:place]) for place, row in enumerate(rows)]
        smallest = min(costs, key=lambda cost: cost.reserved, default=None)
        left_out = [(len(alike), alike[0]) for alike in sorted(self._broken.values(), key=len, reverse=True)]
        floor = len(self._large - self._costs.keys())
        others = sum(self._valid.values()) - len(costs) - floor
        counts = len(costs), sum(not cost.fits for cost in costs), floor, others
        took = time.perf_counter() - began
        unknown = self._unknown.most_common()
        return SearchResult(rows, front, smallest, len(self._valid), left_out, *counts, unknown, took, stopped)

    def _search(self, pool: PlannerProcesses) -> None:
        seeds = sorted(self._planned(pool, self._seeds()), key=lambda cost: cost.priced_rank)
        for seed in seeds[:DESCENTS]:
            # Layouts that are fast and nearly fit lie between slow ones and those that are fast and fit.
            priced = self._descend(pool, seed, lambda cost: cost.priced_rank)
            self._descend(pool, priced, lambda cost: cost.rank)

    def _seeds(self) -> list[Candidate]:
        """Valid layouts that are the most alike to those of the space's seeds."""
        for mode in MODES:
            firsts = (next(filter(self._is_valid, alike), None) for alike in self._space.seeds(mode))
            if found := {seed.identity: seed for seed in firsts if seed is not None}:
                return list(found.values())
        if self._unknown:
            return []
        most = [alike[0] for alike in sorted(self._broken.values(), key=len, reverse=True)[:3]]
        raise UserError(
            f"plan search: each of {len(self._valid)} layouts on {self._space.gpus} GPUs breaks a rule.", most
        )

    def _is_valid(self, candidate: Candidate) -> bool:
        """True if a layout breaks no rule and can be planned."""
        known = self._valid.get(candidate.identity)
        if known is None:
            wrong = next(iter(find_violations(EVERY_RULE, candidate.experiment)), None)
            reason = None if wrong is not None else self._reason(candidate)
            known = self._valid[candidate.identity] = wrong is None and reason is None
            if wrong is not None:
                self._broken[wrong.field].append(wrong)
            elif reason is not None:
                self._unknown[reason] += 1
        return known

    def _reason(self, candidate: Candidate) -> str | None:
        """Reason against planning a layout."""
        layout = candidate.layout
        if layout.parallelism.pp > 1 and layout.stage_count * layout.gradient_accumulation > LONGEST_SCHEDULE:
            return f"their schedules have more than {LONGEST_SCHEDULE:,} forward passes"
        try:
            check_supported(candidate.experiment, self._device)
        except UserError as error:
            return "; ".join(violation.reason for violation in error.violations)
        return unsupported_reason(candidate.experiment)

    def _descend(self, pool: PlannerProcesses, at: LayoutCost, rank: Rank) -> LayoutCost:
        """Layout without a neighbour of a lower rank, from one on by the first such neighbours that are found."""
        while True:
            near = list(self._near(at))
            lower = [cost for each in near if (cost := self._costs.get(each.identity)) and rank(cost) < rank(at)]
            if not lower:
                planned = self._planned(pool, near, until=lambda cost, at=at: rank(cost) < rank(at))
                lower = [cost for cost in planned if rank(cost) < rank(at)]
            if not lower:
                return at
            at = min(lower, key=rank)

    def _near(self, start: LayoutCost) -> Iterator[Candidate]:
        """Neighbours of a layout that may be better, those with the same degrees first."""
        space, recipe = self._space, dict(start.candidate.refined).get(RECIPE)
        found = list(moves(start.candidate.experiment, space.fixed, space.recipes, space.run))
        for move in sorted(found, key=lambda move: any(key in DEGREE_KEYS for key in move.values)):
            if move.direction < 0 if start.fits else move.direction > 0:
                continue
            moved = space.candidate(move.experiment, move.values.get(RECIPE, recipe))
            if self._is_valid(moved) and (not start.fits or self._may_be_faster(start, move, moved)):
                yield moved

    def _may_be_faster(self, start: LayoutCost, move: Move, moved: Candidate) -> bool:
        """False if a move's compute alone takes as long as the step of the best layout, or its state does not fit."""
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
        candidates: Iterable[Candidate],
        until: Callable[[LayoutCost], bool] = lambda _: False,
    ) -> Iterator[LayoutCost]:
        """Costs of layouts that are not planned yet, as they come; after one with `until`, no other is begun."""
        queue = [each for each in candidates if each.identity not in self._costs]
        running, over = dict[Future[LayoutCost | str], Candidate](), False
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
        """Layouts that fit, fastest first; of those that only refine the same layout, the fastest."""
        found: dict[Key, LayoutCost] = {}
        for cost in sorted((cost for cost in self._costs.values() if cost.fits), key=lambda cost: cost.step_seconds):
            found.setdefault(cost.candidate.base, cost)
        return list(found.values())


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


def _plan(candidate: Candidate, device: Device) -> LayoutCost | str:
    """Planned cost of a layout, or the reason for which it cannot be extrapolated."""
    try:
        return planned_cost(candidate, device)
    except ExtrapolationError as error:
        return str(error)
