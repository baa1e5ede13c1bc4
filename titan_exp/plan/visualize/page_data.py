"""Everything that the page's script draws, as plain numbers and words."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence
from titan_exp.plan.predict import Plan, RankPlan
from titan_exp.plan.trace.memory_tracker import CATEGORIES, Moment
from titan_exp.plan.visualize.glossary import device_noun
from titan_exp.plan.visualize.schedule_data import schedule_data
from titan_exp.plan.visualize.shards import RankShards

POINTS = 8000
"""Moments of memory on the page, of all pipeline ranks together."""
FEWEST_POINTS = 100
"""Of one rank, however many there are."""


def page_data(plan: Plan, shards_by_rank: Mapping[int, RankShards]) -> dict[str, Any]:
    """What is drawn of a plan.

    Args:
        plan: of the run.
        holdings: what was seen of the pipeline ranks that were looked at, by their numbers.
    """
    experiment, shards = plan.experiment, next(iter(shards_by_rank.values()))
    moments = max(FEWEST_POINTS, POINTS // len(plan.ranks))
    return {
        "mesh": {
            "axes": shards.axes,
            "sharding": shards.sharding,
            "node": ResolvedLayout.of(experiment).node_size,
            "device": device_noun(experiment),
        },
        "stages": [_ranges(layers) for layers in ResolvedLayout.of(experiment).stage_layers],
        "layers": experiment.model.layers,
        "batch": _batch(experiment),
        "passes": schedule_data(plan),
        "categories": CATEGORIES,
        "room": None if plan.device is None else plan.device.memory_gb * 1e9,
        "ranks": {rank.pipeline_rank: _rank(rank, shards_by_rank[rank.pipeline_rank], moments) for rank in plan.ranks},
        "step": plan.step_seconds,
        "bubble": plan.bubble,
    }


def token_ranges(experiment: Experiment) -> list[list[tuple[int, int]]]:
    """The tokens of every sequence that each context-parallel rank computes: first and last of every piece."""
    parallelism, whole = experiment.parallelism, torch.arange(experiment.training.seq_len)[None]
    within = parallelism.ulysses_degree
    across = parallelism.cp // within
    return [
        _pieces(
            ShardedSequence(
                SequenceShard(across, rank // within, zigzag=True),
                SequenceShard(within, rank % within, zigzag=False),
            )
            .take(whole)[0]
            .tolist()
        )
        for rank in range(parallelism.cp)
    ]


def _batch(experiment: Experiment) -> dict[str, Any]:
    layout = ResolvedLayout.of(experiment)
    return {
        "sequences": experiment.training.global_batch_size,
        "tokens": experiment.training.seq_len,
        "shares": layout.dp_degree,
        "micro": layout.micro_batch_size,
        "microbatches": layout.gradient_accumulation,
        "pieces": token_ranges(experiment),
        "divided": experiment.parallelism.tp > 1 and experiment.parallelism.sequence_parallel,
    }


def _rank(rank: RankPlan, shards: RankShards, moments: int) -> dict[str, Any]:
    trace = rank.trace
    return {
        "weights": [asdict(weight) | {"layers": _ranges(weight.layers)} for weight in shards.weights],
        "messages": [
            {"axis": axis, "kind": kind, "bytes": size, "calls": trace.costs.calls[axis, kind]}
            for (axis, kind), size in sorted(trace.costs.messages.items(), key=lambda item: -item[1])
        ],
        "flops": trace.costs.flops,
        "time": None if rank.time is None else asdict(rank.time),
        "peak": {"bytes": trace.peak.bytes, "of": trace.peak.by_category, "where": trace.peak.where},
        "reserved": None if rank.reserved is None else rank.bytes,
        "memory": _memory(trace.timeline, trace.peak, moments),
    }


def _memory(timeline: list[Moment], peak: Moment, most: int) -> dict[str, Any]:
    """A column for each category, in a unit that leaves about five digits; where moments are, as numbers of words."""
    told = _thinned(timeline, most)
    unit = max(1, peak.bytes // 20_000)
    words = list(dict.fromkeys(moment.where for moment in told))
    return {
        "unit": unit,
        "columns": {
            name: [round(moment.by_category[name] / unit) for moment in told]
            for name in CATEGORIES
            if any(moment.by_category[name] for moment in told)
        },
        "words": words,
        "where": [words.index(moment.where) for moment in told],
        "peak": max(range(len(told)), key=lambda place: told[place].bytes),
    }


def _thinned(moments: list[Moment], most: int) -> list[Moment]:
    """At most so many, of equal spans the largest of each; the first stays."""
    span = max(1, -(-(len(moments) - 1) // (most - 1)))
    spans = [moments[start : start + span] for start in range(1, len(moments), span)]
    return [*moments[:1], *(max(its, key=lambda moment: moment.bytes) for its in spans)]


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    return _pieces(sorted(numbers))


def _pieces(numbers: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as first and last."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
