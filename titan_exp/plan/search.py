"""All layouts of a cluster, the fastest that fit first: a bound for each, and the traces that the best of them need.

A layout is looked at only while its bound says that it may be among the fastest. The bound is the time of its blocks'
matmuls and of the messages that they wait for, so nothing that is left out could have been faster.
"""

import gc
import logging
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import data_parallel_degree, device_type, exchanging_heads, gradient_accumulation
from titan_exp.config.pipeline import layer_counts, stage_count
from titan_exp.plan.alike import why_not
from titan_exp.plan.candidates import Candidates
from titan_exp.plan.devices import Device
from titan_exp.plan.layout_plan import BlockCost, LayoutPlan, block_cost, bubble_of, plan_layout
from titan_exp.plan.predict import on_cpu
from titan_exp.plan.shortcut import Parts, trace_parts

HEADROOM = 0.88
"""Of a device's memory, what tensors may fill: the rest is for what the allocator reserves beyond them, CUDA's context,
cuBLAS's workspaces and NCCL's buffers. A round number from a few runs on one kind of GPU, not a prediction."""

LONGEST_SCHEDULE = 2**13
"""Stages times micro-batches of the longest schedule that is gone through; longer ones take many seconds each."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class Found:
    """What a search has come to."""

    rows: list[LayoutPlan]
    """The fastest layouts that fit, fastest first."""
    front: list[bool]
    """Of each, whether no faster layout takes less memory."""
    smallest: LayoutPlan | None
    """Of the layouts that were looked at, that of the least memory."""
    looked_at: int
    """Layouts whose step was put together from traces."""
    too_large: int
    """Those of them that do not fit."""
    floor: int
    """Layouts left out because parameters, gradients and the optimizer's state alone do not fit."""
    slower: int
    """Layouts left out because their blocks' matmuls and messages alone take longer than the last row."""
    unknown: list[tuple[str, int]]
    """Layouts left out because layers or micro-batches cannot be traced once, by the reason."""
    traces: int
    """Distinct profiles that were traced."""
    seconds: float
    """What it took."""


class Search:
    """A search over candidates, by as many processes as there are cores.

    Args:
        found: the candidates.
        device: what they run on.
        limit: how many rows are wanted.
        tell: is told how it goes, in words.
    """

    def __init__(self, found: Candidates, device: Device, limit: int, tell: Callable[[str], None]) -> None:
        self._device, self._limit, self._tell = device, limit, tell
        reasons = [_too_long(its) or why_not(its) for its in found.experiments]
        self._unknown = Counter(reason for reason in reasons if reason is not None).most_common()
        self._left = [its for its, reason in zip(found.experiments, reasons, strict=True) if reason is None]
        self._room = device.memory_gb * 1e9 * HEADROOM
        self._parts: dict[Key, tuple[Experiment, Parts]] = {}
        self._costs: dict[int, BlockCost] = {}
        self._flops: dict[str, float] = {}
        self._context: tuple[Experiment, float] | None = None
        self._bubbles: dict[Key, float] = {}
        self._guesses: list[LayoutPlan] = []
        self._exact: dict[int, LayoutPlan] = {}

    def run(self) -> Found:
        """Search.

        Raises:
            UserError: something of a layout is not modelled.
        """
        began = time.perf_counter()
        cores = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn"), _quiet) as pool:
            self._seed(pool)
            before = len(self._left)
            self._left = [its for its in self._left if self._floor(its) <= self._room]
            floor = before - len(self._left)
            self._look(pool, 2 * cores)
            rows = self._confirm(pool)
        front = [all(row.peak_bytes < faster.peak_bytes for faster in rows[:place]) for place, row in enumerate(rows)]
        return Found(
            rows,
            front,
            min(self._guesses, key=lambda guess: guess.peak_bytes, default=None),
            len(self._guesses),
            sum(guess.peak_bytes > self._room for guess in self._guesses),
            floor,
            len(self._left),
            self._unknown,
            len(self._parts),
            time.perf_counter() - began,
        )

    def _seed(self, pool: ProcessPoolExecutor) -> None:
        """Costs of a block for every tensor-parallel degree, and the operations of every way of recomputation."""
        by_tp: dict[int, Experiment] = {}
        by_mode: dict[str, Experiment] = {}
        for candidate in sorted(self._left, key=_simplicity):
            by_tp.setdefault(candidate.parallelism.tp, candidate)
            by_mode.setdefault(candidate.activation_checkpoint.mode, candidate)
        # Two ranks that share a sequence, whose messages are not also those of sharding.
        shared = (its for its in self._left if its.parallelism.cp == 2 and its.parallelism.dp_shard > 1)
        pair = min(shared, key=_simplicity, default=None)
        self._trace(pool, [*by_tp.values(), *by_mode.values(), *([] if pair is None else [pair])])
        for tp, experiment in by_tp.items():
            self._costs[tp] = block_cost(*self._parts[_key(experiment)], self._device)
        for mode, experiment in by_mode.items():
            self._flops[mode] = block_cost(*self._parts[_key(experiment)], self._device).flops
        if pair is not None:
            sampled, parts = self._parts[_key(pair)]
            self._context = sampled, block_cost(sampled, parts, self._device).context

    def _look(self, pool: ProcessPoolExecutor, width: int) -> None:
        """Look at layouts, those with the best bounds first, until no other can be among the fastest."""
        self._left.sort(key=self._bound)
        while self._left:
            fits = sorted(guess.step_seconds for guess in self._guesses if guess.peak_bytes <= self._room)
            worst = fits[self._limit - 1] if len(fits) >= self._limit else math.inf
            if self._bound(self._left[0]) > worst:
                return
            wave = self._left[: 8 * width]
            keys = list(dict.fromkeys(_key(its) for its in wave))[:width]
            wave = [its for its in wave if _key(its) in keys and self._bound(its) <= worst]
            self._trace(pool, wave)
            self._time(pool, wave)
            taken = set(map(id, wave))
            self._left = sorted((its for its in self._left if id(its) not in taken), key=self._bound)
            for its in wave:
                self._guesses.append(
                    plan_layout(its, *self._parts[_key(its)], self._device, self._bubbles[_turns(its)])
                )

    def _confirm(self, pool: ProcessPoolExecutor) -> list[LayoutPlan]:
        """Of the fastest, the layouts that fit when they are put together from traces of their own degrees."""
        rows = list[LayoutPlan]()
        guesses = sorted(self._guesses, key=lambda guess: guess.step_seconds)
        guesses = [guess for guess in guesses if guess.peak_bytes <= self._room]
        while guesses and len(rows) < self._limit:
            wave, guesses = guesses[: self._limit - len(rows)], guesses[self._limit - len(rows) :]
            by_profile: dict[Key, list[LayoutPlan]] = {}
            for its in wave:
                sampled = _shards(self._parts[_key(its.experiment)][0])
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

    def _trace(self, pool: ProcessPoolExecutor, experiments: Iterable[Experiment]) -> None:
        missing = {_key(its): its for its in experiments if _key(its) not in self._parts}
        for key, parts in zip(missing, pool.map(_traced, missing.values()), strict=True):
            self._parts[key] = missing[key], parts
            self._tell(f"{len(self._parts)} profiles traced, {len(self._guesses)} layouts looked at")

    def _time(self, pool: ProcessPoolExecutor, experiments: Iterable[Experiment]) -> None:
        missing = {_turns(its): its for its in experiments if _turns(its) not in self._bubbles}
        self._bubbles |= zip(missing, pool.map(bubble_of, missing.values()), strict=True)

    def _bound(self, experiment: Experiment) -> float:
        """Seconds that a step takes at least."""
        parallelism, training = experiment.parallelism, experiment.training
        cost = self._costs[parallelism.tp]
        tokens = training.global_batch_size // data_parallel_degree(experiment) * training.seq_len / parallelism.cp
        flops = self._flops[experiment.activation_checkpoint.mode] / parallelism.tp
        waited = cost.exposed + self._context_bound(experiment)
        seconds = tokens * experiment.model.layers / parallelism.pp * (flops / cost.rate + waited)
        return seconds / (1 - self._bubbles.get(_turns(experiment), _least_bubble(experiment)))

    def _context_bound(self, experiment: Experiment) -> float:
        """Seconds for a token of a rank in which it waits for those that share its sequence, at least.

        From two such ranks on one link. Among more, a token's keys and values make at least half as many hops as there
        are ranks; heads that are exchanged leave their rank but for the share that stays.
        """
        parallelism = experiment.parallelism
        if self._context is None or parallelism.cp == 1 or parallelism.dp_shard == 1:
            return 0.0
        sampled, seconds = self._context
        hops = parallelism.cp / 2 if exchanging_heads(parallelism) == 1 else 2 * (1 - 1 / parallelism.cp)
        return seconds * hops * min(1.0, sampled.parallelism.tp / parallelism.tp)

    def _floor(self, experiment: Experiment) -> float:
        """Bytes that the rank with the most layers holds at least, of its parameters and what belongs to them."""
        parallelism = experiment.parallelism
        cost, shards = self._costs[parallelism.tp], parallelism.dp_shard * parallelism.cp
        counts, ranks = layer_counts(experiment), parallelism.pp
        layers = max(sum(counts[rank::ranks]) for rank in range(ranks))
        return layers * (cost.kept * cost.shards / shards + (cost.gathered if ranks > 1 else 0))


def _simplicity(experiment: Experiment) -> tuple[object, ...]:
    parallelism = experiment.parallelism
    mode, pipeline = experiment.activation_checkpoint.mode, parallelism.pp > 1
    return (
        not pipeline,
        mode != "none",
        parallelism.cp,
        parallelism.tp,
        experiment.training.micro_batch_size,
        parallelism.pp,
    )


def _key(experiment: Experiment) -> Key:
    """What a profile depends on; the number of shards only divides what is kept."""
    parallelism = experiment.parallelism
    piped = parallelism.pp > 1
    return (
        parallelism.tp,
        parallelism.cp,
        experiment.activation_checkpoint.mode,
        experiment.training.micro_batch_size,
        piped,
        frozenset(count == 1 for count in layer_counts(experiment)) if piped else None,
        None if piped else min(gradient_accumulation(experiment), 3),
        parallelism.dp_shard > 1,
        parallelism.dp_replicate > 1,
    )


def _turns(experiment: Experiment) -> Key:
    parallelism = experiment.parallelism
    return parallelism.pp, parallelism.pp_schedule, gradient_accumulation(experiment) if parallelism.pp > 1 else 0


def _too_long(experiment: Experiment) -> str | None:
    if (
        experiment.parallelism.pp == 1
        or stage_count(experiment) * gradient_accumulation(experiment) <= LONGEST_SCHEDULE
    ):
        return None
    return f"their schedules have more than {LONGEST_SCHEDULE:,} forward passes"


def _least_bubble(experiment: Experiment) -> float:
    """What no schedule is below whose stages go round the ranks.

    The last rank waits until the first micro-batch has come through a stage of every other, and after its last one
    they are not done.
    """
    ranks, stages = experiment.parallelism.pp, stage_count(experiment) if experiment.parallelism.pp > 1 else 1
    waits = (ranks - 1) * ranks / stages
    return waits / (gradient_accumulation(experiment) + waits)


def _quiet() -> None:
    """Once in each process: no words about every model that is built, and what is imported is not looked at as garbage
    before every trace, which would take longer than many of them."""
    logging.disable(logging.INFO)
    gc.freeze()


def _traced(experiment: Experiment) -> Parts:
    return trace_parts(on_cpu(experiment), cuda=device_type(experiment.cluster) == "cuda")


def _shards(experiment: Experiment) -> tuple[int, int]:
    return experiment.parallelism.dp_replicate, experiment.parallelism.dp_shard


def _exactly(given: tuple[list[LayoutPlan], Device]) -> list[LayoutPlan]:
    """Layouts of one profile anew, from a trace with their own number of shards."""
    plans, device = given
    sampled = plans[0].experiment
    parts = _traced(sampled)
    return [plan_layout(its.experiment, sampled, parts, device, its.bubble) for its in plans]
