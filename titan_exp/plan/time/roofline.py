"""Roofline step time: work over its bounding rate, with FSDP's collectives overlapped with compute.

Launch-bound kernels, host work with CPU offload, stragglers and congested networks are not counted: real runs are
usually slower, rarely faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from titan_exp.config.groups.parallelism import ParallelismConfig
from titan_exp.config.layout.axes import AXES
from titan_exp.config.layout.pipeline_schedules import Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import timeline
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.cuda.cpu_offload import AXIS, WAITED_FOR
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.trace.dispatch_mode import OpCosts

BEHIND_COMPUTE = ("fsdp", "dp_replicate")
"""Mesh axes whose collectives overlap with compute."""

CP_KINDS = ("send", "receive", "all-to-all")
"""Message kinds of context parallelism only, never of FSDP or replication: ring hops and Ulysses all-to-all."""


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank's step, without the pipeline bubble."""

    matmuls: float
    """Matmuls and attention."""
    elementwise: float
    """Operators bound by memory bandwidth."""
    exposed: float
    """Exposed communication: tensor, context and pipeline parallelism."""
    behind: float
    """Overlapped communication: FSDP, replication and their host copies, in sequence."""
    operators: float = 0.0
    """Fixed overhead of all operators."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return max(self.matmuls + self.elementwise + self.operators + self.exposed, self.behind)


def rank_time(costs: OpCosts, axes: Mapping[str, Sequence[int]], device: Device, node: int) -> RankTime:
    """Estimate the time of a traced step on nodes of `node` devices.

    `axes` maps every mesh axis with messages to the ranks of this rank's process group.
    """
    exposed, behind = 0.0, 0.0
    for (axis, kind), size in costs.messages.items():
        if axis == AXIS:
            seconds = size / (device.host_gbs * 1e9 * device.link_share)
            exposed, behind = (exposed + seconds, behind) if kind == WAITED_FOR else (exposed, behind + seconds)
            continue
        seconds = message_seconds(kind, size, axes.get(axis, [0]), device, node)
        # Two axes with equal ranks share a group, named "cp_across=fsdp"; its ring hops are exposed.
        if set(axis.split("=")) & set(BEHIND_COMPUTE) and kind not in CP_KINDS:
            behind += seconds
        else:
            exposed += seconds
    return RankTime(
        (costs.flops - costs.fp8_flops) / device.matmul_rate + costs.fp8_flops / device.fp8_rate,
        costs.bytes_moved / (device.bandwidth_tbs * 1e12 * device.bandwidth_share),
        exposed,
        behind,
        costs.operators * device.operator_us / 1e6,
    )


def axis_ranks(parallelism: ParallelismConfig, pipeline_rank: int, costs: OpCosts) -> dict[str, list[int]]:
    """Ranks of the first rank's process group, by mesh axis of its messages."""
    shape = tuple(axis.degree(parallelism) for axis in AXES)
    mesh = np.arange(int(np.prod(shape))).reshape(shape)
    names, sharded = [axis.name for axis in AXES], {axis.name for axis in AXES if axis.shards_parameters}
    groups = {}
    for axis, _ in costs.messages:
        along = sharded if "fsdp" in axis.split("=") else {axis.split("=")[0]}
        at = tuple(slice(None) if name in along else pipeline_rank if name == "pp" else 0 for name in names)
        groups[axis] = mesh[at].flatten().tolist()
    return groups


@cache
def schedule_and_bubble(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[Schedule, float]:
    """Actions of every pipeline rank, and the bubble as a share of the step."""
    orders = build_schedule(schedule, ranks, stages, microbatches)
    return orders, timeline(orders).bubble


def pipeline_bubble(layout: ResolvedLayout) -> float:
    """Pipeline bubble as a share of the step; 0 without a pipeline."""
    parallelism = layout.parallelism
    if parallelism.pp == 1:
        return 0.0
    _, bubble = schedule_and_bubble(
        parallelism.pp_schedule, parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    )
    return bubble


def message_seconds(kind: str, size: int, ranks: Sequence[int], device: Device, node: int) -> float:
    """Seconds of one rank's messages of one kind, with ring algorithms."""
    if kind == "receive" or len(ranks) < 2:
        return 0.0  # counted by the sender
    nodes = len({rank // node for rank in ranks})
    # Across nodes, the adapters of all ranks of the group work in parallel.
    rate = device.link_gbs if nodes == 1 else min(device.link_gbs, device.network_gbs * len(ranks) / nodes)
    rate *= 1e9 * device.link_share
    others = (len(ranks) - 1) / len(ranks)
    share = {"all-gather": others, "reduce-scatter": others, "all-to-all": others, "all-reduce": 2 * others}
    return size * share.get(kind, 1.0) / rate
