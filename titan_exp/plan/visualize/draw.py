"""HTML page of a plan, self-contained: no network, no other file, no library.

Sentences are in its template; the scripts in `page/` draw the rest from embedded numbers.
"""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence, sequence_cuts
from titan_exp.plan.gate.gate import MemoryCheck
from titan_exp.plan.planner_processes import no_garbage_collection
from titan_exp.plan.predict import Plan, RankPlan, traced_rank
from titan_exp.plan.trace.memory_tracker import CATEGORIES, Moment
from titan_exp.plan.visualize.glossary import MEANINGS, WORDS, device_noun, facts
from titan_exp.plan.visualize.schedule import schedule_data
from titan_exp.plan.visualize.shards import RankShards, read_shards
from titan_exp.tracking.html import render_page
from titan_exp.tracking.number_format import format_items

SCRIPTS = ("numbers.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""Files of `page/` in the order of inclusion."""
POINTS = 8000
"""Number of points of memory timelines, for all pipeline ranks together."""
MIN_POINTS = 100
"""Minimum number of points of one rank."""


def html_page(plan: Plan, memory_check: MemoryCheck, command: str) -> str:
    """Page of a plan made by `command`."""
    degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in MEANINGS}
    return render_page(
        "titan_exp.plan.visualize",
        SCRIPTS,
        _page_data(plan),
        plan=plan,
        processes=plan.layout.world_size,
        device=device_noun(plan.layout),
        degrees=degrees,
        facts=list(facts(plan, memory_check)),
        command=command,
        items=format_items,
        axes=dict(sorted(MEANINGS.items(), key=lambda entry: degrees[entry[0]] == 1)),
    )


def _page_data(plan: Plan) -> dict[str, Any]:
    """Numbers of the page's scripts."""
    layout, shards_by_rank = plan.layout, dict[int, RankShards]()
    with no_garbage_collection():
        for rank in plan.ranks:
            with traced_rank(plan.experiment, plan.device, rank.pipeline_rank) as fake:
                shards_by_rank[rank.pipeline_rank] = read_shards(fake)
    shards = next(iter(shards_by_rank.values()))
    moments = max(MIN_POINTS, POINTS // len(plan.ranks))
    return {
        "mesh": {
            "axes": shards.axes,
            "experts": shards.experts,
            "sharding": shards.sharding,
            "node": layout.node_size,
            "device": device_noun(layout),
        },
        "stages": [_pieces(layers) for layers in layout.stage_layers],
        "layers": layout.layers,
        "batch": _batch(layout) | {"pieces": token_ranges(plan.experiment)},
        "passes": schedule_data(plan),
        "categories": CATEGORIES,
        "room": None if plan.device is None else plan.device.memory,
        "ranks": {rank.pipeline_rank: _rank(rank, shards_by_rank[rank.pipeline_rank], moments) for rank in plan.ranks},
        "step": plan.step_seconds,
        "bubble": plan.bubble,
        "words": WORDS,
    }


def token_ranges(experiment: Experiment) -> list[list[tuple[int, int]]]:
    """Token ranges of each context-parallel rank: first and last of every piece."""
    parallelism, seq_len = experiment.parallelism, experiment.training.seq_len
    spec, whole = model_spec(experiment.model), torch.arange(seq_len)[None]
    cuts, causal = sequence_cuts(spec, parallelism, seq_len), spec is None or spec.is_causal
    lengths = (seq_len,) if spec is None else spec.streams(seq_len)
    within = parallelism.ulysses_degree
    across = parallelism.cp // within
    found = []
    for rank in range(parallelism.cp):
        outer = SequenceShard(across, rank // within, zigzag=causal, cuts=cuts)
        shard = ShardedSequence(outer, SequenceShard(within, rank % within, zigzag=False))
        found.append(_pieces(torch.cat([shard.take(stream)[0] for stream in whole.split(lengths, dim=1)]).tolist()))
    return found


def _batch(layout: ResolvedLayout) -> dict[str, Any]:
    return {
        "sequences": layout.training.global_batch_size,
        "tokens": layout.training.seq_len,
        "shares": layout.dp_degree,
        "micro": layout.micro_batch_size,
        "microbatches": layout.gradient_accumulation,
        "divided": layout.parallelism.tp > 1 and layout.parallelism.sequence_parallel,
    }


def _rank(rank: RankPlan, shards: RankShards, moments: int) -> dict[str, Any]:
    trace = rank.trace
    return {
        "weights": [asdict(weight) | {"layers": _pieces(weight.layers)} for weight in shards.weights],
        "messages": sorted(rank.messages, key=itemgetter("bytes"), reverse=True),
        "flops": trace.costs.flops,
        "time": None if rank.time is None else asdict(rank.time),
        "peak": {"bytes": trace.peak.bytes, "of": trace.peak.by_category, "where": trace.peak.where},
        "reserved": None if rank.allocator is None else rank.bytes,
        "memory": _memory(trace.timeline, trace.peak, moments),
    }


def _memory(timeline: list[Moment], peak: Moment, most: int) -> dict[str, Any]:
    """Memory over a step: one column per category, in a unit that leaves five digits, and phases as indices."""
    moments = _downsample(timeline, most)
    unit = max(1, peak.bytes // 20_000)
    phases = list(dict.fromkeys(moment.where for moment in moments))
    return {
        "unit": unit,
        "columns": {
            name: [round(moment.by_category[name] / unit) for moment in moments]
            for name in CATEGORIES
            if any(moment.by_category[name] for moment in moments)
        },
        "words": phases,
        "where": [phases.index(moment.where) for moment in moments],
        "peak": max(range(len(moments)), key=lambda index: moments[index].bytes),
    }


def _downsample(moments: list[Moment], most: int) -> list[Moment]:
    """First moment, and the maximum of each of equal spans."""
    span = max(1, -(-(len(moments) - 1) // (most - 1)))
    spans = [moments[start : start + span] for start in range(1, len(moments), span)]
    return [*moments[:1], *(max(span, key=lambda moment: moment.bytes) for span in spans)]


def _pieces(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers."""
    runs = groupby(enumerate(numbers), key=lambda place: place[1] - place[0])
    pieces = ([number for _, number in run] for _, run in runs)
    return [(piece[0], piece[-1]) for piece in pieces]
