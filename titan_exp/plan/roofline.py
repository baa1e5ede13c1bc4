"""Roofline step time: work over its sustained rate, with FSDP's collectives overlapped with compute.

The host launches operators while the device computes; the slower of both counts. Small kernels, host work with CPU
offload, stragglers and congested networks are not counted: real runs are usually slower, rarely faster.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.axes import AXES, EXPERT_AXES
from titan_exp.config.layout.pipeline_schedules import Schedule, timeline
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_runtime import build_schedule
from titan_exp.plan.devices import Device
from titan_exp.plan.prediction import RankTime
from titan_exp.plan.trace import op_costs
from titan_exp.plan.trace.dispatch_mode import WORLD, OpCosts
from titan_exp.plan.trace.torch_patches import AXIS, WAITED_FOR

BEHIND_COMPUTE = ("fsdp", "efsdp", "dp_replicate")  # mesh axes whose collectives overlap with compute
CP_KINDS = ("send", "receive", "all-to-all")
"""Message kinds that only context parallelism has, never FSDP or replication: ring hops and Ulysses all-to-all."""
ROUNDS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""Rounds of a ring, by kind of collective; others send directly."""


def rank_time(costs: OpCosts, axes: Mapping[str, Sequence[int]], device: Device, node: int) -> RankTime:
    """Estimate the time of a traced step on nodes of `node` devices; `axes` maps every mesh axis with messages to the
    ranks of this rank's process group."""
    exposed, behind = 0.0, 0.0
    for (axis, kind), size in costs.messages.items():
        if axis == AXIS:
            seconds = size / (device.host_gbs * 1e9 * device.link_share)
            exposed, behind = (exposed + seconds, behind) if kind == WAITED_FOR else (exposed, behind + seconds)
            continue
        calls = costs.calls.get((axis, kind), 0)
        seconds = message_seconds(kind, size, axes.get(axis, [0]), device, node, calls=calls)
        # Two axes with equal ranks share a group, named like "cp_across=fsdp"; its ring hops are exposed.
        if set(axis.split("=")) & set(BEHIND_COMPUTE) and kind not in CP_KINDS:
            behind += seconds
            # Nothing overlaps with the first gather and the last reduction of a step, which we take to be of mean size.
            exposed += seconds / max(1, calls)
        else:
            hidden = min(seconds, seconds_beside(costs, kind, device))
            exposed, behind = exposed + seconds - hidden, behind + hidden
    matmuls, elementwise = _kernel_seconds(costs, device)
    launches = device.launch_seconds(costs.operators, matmuls + elementwise)
    return RankTime(matmuls, elementwise, exposed, behind, launches)


@dataclass(frozen=True)
class ClassTime:
    """Kernels of one class in a step."""

    name: str
    launches: int  # number of kernels; a multi-tensor operator is one
    flops: int
    bytes: int  # bytes moved by other kernels, and by experts' matmuls
    seconds: float | None


def class_times(costs: OpCosts, device: Device | None) -> list[ClassTime]:
    """Kernels of a step by class, without empty classes. Seconds sum up to those of `rank_time`."""
    found = []
    for name in op_costs.KERNEL_CLASSES:
        flops, fp8, size, launches = (costs.kernels.get((name, measure), 0) for measure in op_costs.MEASURES)
        if launches:
            moved = 0 if flops else size
            kernels = {key: count for key, count in costs.kernels.items() if key[0] == name}
            part = OpCosts(flops=flops, fp8_flops=fp8, bytes_moved=moved, kernels=kernels)
            seconds = None if device is None else sum(_kernel_seconds(part, device))
            found.append(ClassTime(name, launches, flops, size, seconds))
    return found


def _kernel_seconds(costs: OpCosts, device: Device) -> tuple[float, float]:
    """Seconds of matmuls and attention, and of other kernels."""
    flops, fp8, size, _ = (costs.kernels.get((op_costs.EXPERT_MATMULS, measure), 0) for measure in op_costs.MEASURES)
    # Reading and writing the operands of experts' matmuls may exceed their computation.
    weights = size / device.bandwidth - (flops - fp8) / device.matmul_rate - fp8 / device.fp8_rate
    streamed = sum(costs.kernels.get((name, "bytes"), 0) for name in op_costs.STREAMS)
    elementwise = (costs.bytes_moved - streamed) / device.bandwidth + streamed / device.copy_bandwidth
    return compute_seconds(costs, device) + max(0.0, weights), elementwise


def compute_seconds(costs: OpCosts, device: Device) -> float:
    """Seconds of matmuls and attention if reading operands bounds none of them."""
    seconds = (costs.flops - costs.fp8_flops) / device.matmul_rate + costs.fp8_flops / device.fp8_rate
    for name, rate in zip((op_costs.ATTENTION, op_costs.ATTENTION_BACKWARD), device.attention_rates, strict=True):
        seconds += costs.kernels.get((name, "flops"), 0) * (1 / rate - 1 / device.matmul_rate)
    return seconds


def seconds_beside(costs: OpCosts, kind: str, device: Device) -> float:
    """Seconds of the matmuls that overlap with a kind of message, sent in pieces; 0 for other kinds."""
    flops, fp8 = (costs.kernels.get((kind, measure), 0) for measure in op_costs.MEASURES[:2])
    return compute_seconds(OpCosts(flops=flops, fp8_flops=fp8), device)


def axis_ranks(parallelism: ParallelismConfig, pipeline_rank: int, costs: OpCosts) -> dict[str, list[int]]:
    """Ranks of the first rank's process groups, by mesh axis of its messages."""
    meshes = [{axis.name: axis.degree(parallelism) for axis in axes} for axes in (AXES, EXPERT_AXES)]
    sharded, groups = {axis.name for axis in AXES if axis.shards_parameters}, dict[str, list[int]]()
    for axis, _ in costs.messages:
        name = axis.split("=")[0]
        along = sharded if "fsdp" in axis.split("=") else set(meshes[0]) if name == WORLD else {name}
        degrees = next((mesh for mesh in meshes if along & set(mesh)), meshes[0])
        ranks = np.arange(prod(degrees.values())).reshape(tuple(degrees.values()))
        at = tuple(slice(None) if of in along else pipeline_rank if of == "pp" else 0 for of in degrees)
        groups[axis] = ranks[at].flatten().tolist()
    return groups


@cache
def schedule_and_bubble(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[Schedule, float]:
    """Actions of every pipeline rank, and the bubble as a share of the step."""
    orders = build_schedule(schedule, ranks, stages, microbatches)
    return orders, timeline(orders).bubble


def pipeline_bubble(layout: ResolvedLayout) -> float:
    """Pipeline bubble as a share of the step; 0 without a pipeline."""
    own = layout.parallelism
    if own.pp == 1:
        return 0.0
    return schedule_and_bubble(own.pp_schedule, own.pp, layout.stage_count, layout.pipeline_microbatches)[1]


def message_seconds(kind: str, size: int, ranks: Sequence[int], device: Device, node: int, *, calls: int = 0) -> float:
    """Seconds of one rank's messages of one kind: by ring algorithms, or all-to-all directly to each rank. `calls`
    messages have `size` bytes in total; each adds the latency of its hops around the ring."""
    if kind == "receive" or len(ranks) < 2:
        return 0.0  # the sender counts them
    nodes = Counter(rank // node for rank in ranks)
    rate, others = device.link_gbs, (len(ranks) - 1) / len(ranks)
    rounds = ROUNDS.get(kind.partition(op_costs.BESIDE)[0], 0)
    hops = (len(ranks) - len(nodes), len(nodes) - 1) if rounds else (len(nodes) == 1, len(nodes) > 1)
    microseconds = device.message_us + max(1, rounds) * (hops[0] * device.link_hop_us + hops[1] * device.network_hop_us)
    latency = calls * microseconds / 1e6
    if kind == "all-to-all":
        # Through the links of the node and the adapter at once; ranks of the smallest part send the most outside.
        outside = (len(ranks) - min(nodes.values())) / len(ranks)
        slower = max((others - outside) / rate, outside / device.network_gbs)
        return latency + size * slower / 1e9 / device.link_share
    if len(nodes) > 1:
        # The adapters of all ranks of the group work in parallel.
        rate = min(rate, device.network_gbs * len(ranks) / len(nodes))
    return latency + size * (rounds * others or 1.0) / (rate * 1e9 * device.link_share)
