"""HTML page of a plan, self-contained: no network, no other file, no library.

Its template has the sentences; the scripts in `page/` draw the rest from embedded numbers.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout import axes
from titan_exp.config.layout.axes import AXES
from titan_exp.config.layout.pipeline_schedules import COST, Action, Schedule, Timeline, timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence, sequence_cuts
from titan_exp.plan.gate import MemoryCheck
from titan_exp.plan.planner_processes import no_garbage_collection
from titan_exp.plan.predict import Plan, RankPlan, traced_rank
from titan_exp.plan.roofline import schedule_and_bubble
from titan_exp.plan.trace.memory_tracker import CATEGORIES, Moment
from titan_exp.plan.trace.segments import parameters_in_blocks
from titan_exp.plan.trace.trace_step import FakeRank
from titan_exp.tracking.display import format_bytes, format_items, format_seconds, render_page


def _explanation(degree: str) -> str:
    of_degree = [axis for axis in (*axes.AXES, *axes.EXPERT_AXES) if axis.key == degree and axis.name != "efsdp"]
    return f"{of_degree[0].meaning} Communication: {'; '.join(dict.fromkeys(axis.collectives for axis in of_degree))}."


MEANINGS = {degree: _explanation(degree) for degree in (*reversed(axes.DEGREES), "ep", "etp")}
"""Degrees, from the innermost mesh axis (adjacent ranks) outwards, then those of experts."""
WORDS = {"axes": MEANINGS} | json.loads((Path(__file__).parent / "page" / "glossary.json").read_text(encoding="utf-8"))
"""Explanations for the page's scripts: axes, communication, parts of a step's time, and categories of memory."""


def facts(plan: Plan, memory_check: MemoryCheck) -> Iterator[tuple[str, str, str]]:
    """Headline numbers of a plan as (quantity, value, note); the first says whether it fits."""
    largest = plan.largest
    on = f" on pipeline rank {largest.pipeline_rank}" if plan.experiment.parallelism.pp > 1 else ""
    memory, needed = memory_check.device_memory, format_bytes(memory_check.needed or 0)
    if largest.allocator is None:
        note = f"{format_bytes(largest.bytes)} of tensors{on}, plus the processes"
    else:
        note = f"{format_bytes(largest.bytes)} reserved{on}, plus CUDA's context and NCCL's buffers"
    if memory is None or memory.capacity is None:
        yield "memory", needed, note
    else:
        verdict = plan.verdict(fits=memory_check.fits is not False)
        yield verdict, f"{needed} of {format_bytes(memory.capacity)}", note
    if plan.step_seconds is not None:
        yield "step", format_seconds(plan.step_seconds), "estimated from the device's rates"
        yield "speed", f"{plan.tokens_per_second:,.0f} tokens/s", "per device"
        if plan.mfu is not None:
            yield "MFU", f"{plan.mfu:.0%}", "of the device's bf16 peak"
    if plan.experiment.parallelism.pp > 1:
        yield "bubble", f"{plan.bubble:.1%}", "of the step, if stages take equally long"
    yield "checkpoint", format_bytes(plan.checkpoint_bytes), "weights and optimizer state"


def read_shards(rank: FakeRank) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the mesh and the sharded weights of a fake rank, before or after its step. The mesh has the degrees of its
    axes and, unless experts are sharded like other weights, of the experts' axes, and the mesh axes that make up each
    axis that divides weights; all outermost first."""
    mesh, pipeline = rank.state.mesh, rank.state.built.pipeline
    stages = (
        [(0, rank.state.built.module)] if pipeline is None else [(part.number, part.module) for part in pipeline.stages]
    )
    folded = {"fsdp": tuple(axis.name for axis in AXES if axis.shards_parameters)}
    experts = {} if mesh.experts is None else _degrees(mesh.experts)
    sharding = {axis: folded.get(axis, (axis,)) for axis in (*_degrees(mesh.sharding), *experts)}
    weights = [weight for number, module in stages for weight in _weights(number, module)]
    return {"axes": _degrees(mesh.world), "experts": experts, "sharding": sharding}, weights


def _degrees(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _weights(stage: int, module: nn.Module) -> Iterator[dict[str, Any]]:
    """Weights of a stage; equal weights of its blocks are listed once."""
    layers: dict[tuple[str, tuple[int, ...], int, tuple[tuple[str, int], ...]], list[int]] = {}
    for number, full_name, weight in parameters_in_blocks(module):
        name = full_name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        key = (name, tuple(weight.shape), weight.element_size(), sharded_dims(weight))
        layers.setdefault(key, []).extend([] if number is None else [number])
    for (name, shape, itemsize, cuts), numbers in layers.items():
        yield {
            "stage": stage,
            "name": name,
            "layers": _pieces(numbers),  # blocks with this weight; none for a weight outside blocks
            "shape": shape,
            "itemsize": itemsize,
            "cuts": cuts,
        }


def sharded_dims(weight: Tensor) -> tuple[tuple[str, int], ...]:
    """Mesh axes larger than 1 that divide a weight, each with its dim, in the order of division. Each axis makes one
    piece per rank, with sizes rounded up, so the last may be smaller or empty."""
    if not isinstance(weight, DTensor):
        return ()
    mesh = weight.device_mesh
    divided = [
        (axis, placement)
        for axis, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, weight.placements, strict=True)
        if size > 1 and isinstance(placement, Shard | _StridedShard)
    ]
    # A strided shard divides the shards of the axes after it.
    divided.sort(key=lambda division: isinstance(division[1], _StridedShard))
    return tuple((axis, placement.dim) for axis, placement in divided)


NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
UNIT_US = 1000.0  # microseconds of a forward pass if no rates are known
MIN_GAP = 1e-6  # minimum idle time as a share of a forward pass; less is rounding


@dataclass(frozen=True)
class PipelineSchedule:
    """Schedule of one pass of micro-batches."""

    orders: Schedule
    placement: list[int]
    passes: int

    def timeline(self, plan: Plan) -> tuple[Timeline, list[float]]:
        """Timeline of a pass, and seconds of each stage's forward pass, or 1 if the device's rates are unknown."""
        costs = [1.0] * len(self.placement)
        if plan.step_seconds is not None:
            # Stages of a rank are equal.
            pass_seconds = plan.step_seconds * (1 - plan.bubble) / self.passes
            units = [sum(COST[action.kind] for action in order) for order in self.orders]
            costs = [pass_seconds / units[rank] for rank in self.placement]
        return timeline(self.orders, costs), costs


def schedule_of(layout: ResolvedLayout) -> PipelineSchedule:
    """Schedule of a layout, with or without a pipeline."""
    parallelism, micro_batches = layout.parallelism, layout.gradient_accumulation
    if parallelism.pp == 1:
        return PipelineSchedule([[Action(0, kind, number) for number in range(micro_batches) for kind in "FB"]], [0], 1)
    placement, together = layout.stage_placement, layout.pipeline_microbatches
    orders, _ = schedule_and_bubble(parallelism.pp_schedule, parallelism.pp, len(placement), together)
    return PipelineSchedule(orders, placement, micro_batches // together)


def schedule_data(plan: Plan) -> dict[str, Any]:
    """Schedule as JSON: actions and idle times of each rank as text, in units of a forward pass if times are unknown.
    Every stage takes equally long, so that the last action ends with the plan's step."""
    schedule = schedule_of(plan.layout)
    line, costs = schedule.timeline(plan)
    return {
        "cost": COST,
        "placement": schedule.placement,
        "passes": schedule.passes,
        "microbatches": 1 + max(action.microbatch for order in schedule.orders for action in order),
        "estimated": plan.step_seconds is not None,
        "costs": costs,
        "end": max(line.end.values()),
        "bubble": line.bubble,
        "rows": [schedule_text(order, line.end, costs) for order in schedule.orders],
    }


def schedule_text(order: Sequence[Action], end: dict[Action, float], stage_costs: Sequence[float]) -> str:
    """Actions of a rank, e.g. `2F0`, with idle times, e.g. `~1.5`."""
    parts, now = [], 0.0
    for action in order:
        cost = COST[action.kind] * stage_costs[action.stage]
        gap = end[action] - cost - now
        if gap > MIN_GAP * max(stage_costs):
            parts.append(f"~{gap:.6g}")
        parts.append(str(action))
        now = end[action]
    return " ".join(parts)


def trace_json(plan: Plan) -> str:
    """Trace of a plan's step as JSON, with the page's schedule."""
    known = plan.step_seconds is not None
    unit = "estimated from the device's rates" if known else "one millisecond for each forward pass"
    title = f"{plan.experiment.model.name} on {plan.layout.world_size}: planned step, {unit}"
    schedule, scale, events = schedule_of(plan.layout), 1e6 if known else UNIT_US, list[dict[str, Any]]()
    line, seconds = schedule.timeline(plan)
    whole = max(line.end.values())
    for rank, order in enumerate(schedule.orders):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
        for turn, action in product(range(schedule.passes), order):
            took, name = COST[action.kind] * seconds[action.stage], NAMES[action.kind]
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": 0,
                    "cat": name,
                    "name": f"{name}, micro-batch {action.microbatch}",
                    "ts": round((turn * whole + line.end[action] - took) * scale, 3),
                    "dur": round(took * scale, 3),
                    "args": {"stage": action.stage, "micro-batch": action.microbatch, "pass": turn},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}) + "\n"


SCRIPTS = ("numbers.js", "layout.js", "ranks.js", "rank.js", "pipeline.js", "memory.js", "time.js", "start.js")
"""Files of `page/` in the order of inclusion."""
POINTS = 8000  # number of points in memory timelines, for all pipeline ranks together
MIN_POINTS = 100


def html_page(plan: Plan, memory_check: MemoryCheck, command: str) -> str:
    """Page of a plan made by `command`."""
    degrees = {axis: getattr(plan.experiment.parallelism, axis) for axis in MEANINGS}
    noun = "GPU" if plan.layout.device_type == "cuda" else "process"
    return render_page(
        "titan_exp.plan",
        SCRIPTS,
        _page_data(plan, noun),
        plan=plan,
        processes=plan.layout.world_size,
        device=noun,
        degrees=degrees,
        facts=list(facts(plan, memory_check)),
        command=command,
        items=format_items,
        axes=dict(sorted(MEANINGS.items(), key=lambda entry: degrees[entry[0]] == 1)),
    )


def _page_data(plan: Plan, device: str) -> dict[str, Any]:
    layout, shards = plan.layout, dict[int, tuple[dict[str, Any], list[dict[str, Any]]]]()
    with no_garbage_collection():
        for rank in plan.ranks:
            with traced_rank(plan.experiment, plan.device, rank.pipeline_rank) as fake:
                shards[rank.pipeline_rank] = read_shards(fake)
    mesh, _ = next(iter(shards.values()))
    moments = max(MIN_POINTS, POINTS // len(plan.ranks))
    return {
        "mesh": {**mesh, "node": layout.node_size, "device": device},
        "stages": [_pieces(layers) for layers in layout.stage_layers],
        "layers": layout.layers,
        "batch": {
            "sequences": layout.training.global_batch_size,
            "tokens": layout.training.seq_len,
            "shares": layout.dp_degree,
            "micro": layout.micro_batch_size,
            "microbatches": layout.gradient_accumulation,
            "divided": layout.parallelism.tp > 1 and layout.parallelism.sequence_parallel,
            "pieces": token_ranges(plan.experiment),
        },
        "passes": schedule_data(plan),
        "categories": CATEGORIES,
        "room": None if plan.device is None else plan.device.memory,
        "ranks": {rank.pipeline_rank: _rank(rank, shards[rank.pipeline_rank][1], moments) for rank in plan.ranks},
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


def _rank(rank: RankPlan, weights: list[dict[str, Any]], moments: int) -> dict[str, Any]:
    trace = rank.trace
    return {
        "weights": weights,
        "messages": sorted(rank.messages, key=itemgetter("bytes"), reverse=True),
        "flops": trace.costs.flops,
        "time": None if rank.time is None else asdict(rank.time),
        "peak": {"bytes": trace.peak.bytes, "of": trace.peak.by_category, "where": trace.peak.where},
        "reserved": None if rank.allocator is None else rank.bytes,
        "memory": _memory(trace.timeline, trace.peak, moments),
    }


def _memory(timeline: list[Moment], peak: Moment, most: int) -> dict[str, Any]:
    """Memory over a step: a column per category, in a unit that leaves five digits, and phases as indices."""
    # The first moment, and the maximum of each of equal spans.
    span = max(1, -(-(len(timeline) - 1) // (most - 1)))
    spans = [timeline[start : start + span] for start in range(1, len(timeline), span)]
    moments = [*timeline[:1], *(max(span, key=lambda moment: moment.bytes) for span in spans)]
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


def _pieces(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of consecutive numbers."""
    runs = groupby(enumerate(numbers), key=lambda place: place[1] - place[0])
    pieces = ([number for _, number in run] for _, run in runs)
    return [(piece[0], piece[-1]) for piece in pieces]
