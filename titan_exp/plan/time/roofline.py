"""How long a traced step takes: each kind of work at the rate that bounds it, sharding's messages behind compute.

Kernels that wait for the host, what the host computes itself where parameters are offloaded, slow ranks and crowded
networks are not in it: runs are slower, rarely faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import timeline
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.cuda.cpu_offload import AXIS, WAITED_FOR
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.trace.dispatch_mode import OpCosts

BEHIND_COMPUTE = ("fsdp", "dp_replicate")
"""Axes whose messages travel while something is computed."""


OF_SEQUENCES = ("send", "receive", "all-to-all")
"""Kinds of messages that sharding and replication do not send: a ring's, and of heads that are exchanged."""


@dataclass(frozen=True)
class RankTime:
    """Seconds of a rank's step, waiting for other pipeline ranks left out."""

    matmuls: float
    """Matmuls and attention."""
    elementwise: float
    """Everything that memory's bandwidth bounds."""
    exposed: float
    """Messages that compute waits for: tensor, context and pipeline parallelism's."""
    behind: float
    """Messages of sharding and replication, and what is copied from and to the host for them: all behind compute, one
    after the other."""
    operators: float = 0.0
    """What operators take by their number, whatever they do."""

    @property
    def total(self) -> float:
        """Of the step."""
        return max(self.matmuls + self.elementwise + self.operators + self.exposed, self.behind)


class Traced(Protocol):
    """What is known of a step's work."""

    @property
    def costs(self) -> OpCosts:
        """Operations, bytes and messages of the step."""
        ...

    @property
    def axes(self) -> dict[str, list[int]]:
        """Ranks of this rank's group along every axis that it sends messages on."""
        ...


def rank_time(trace: Traced, device: Device, node: int) -> RankTime:
    """Estimate a traced step.

    Args:
        trace: of the step.
        device: what it runs on.
        node: devices of a node.
    """
    work, exposed, behind = trace.costs, 0.0, 0.0
    for (axis, kind), size in work.messages.items():
        if axis == AXIS:
            seconds = size / (device.host_gbs * 1e9 * device.link_share)
            exposed, behind = (exposed + seconds, behind) if kind == WAITED_FOR else (exposed, behind + seconds)
            continue
        seconds = message_seconds(kind, size, trace.axes.get(axis, [0]), device, node)
        # An axis that shares all its ranks with others is theirs too: "cp_across=fsdp", and its rings are waited for.
        if set(axis.split("=")) & set(BEHIND_COMPUTE) and kind not in OF_SEQUENCES:
            behind += seconds
        else:
            exposed += seconds
    return RankTime(
        (work.flops - work.fp8_flops) / device.matmul_rate + work.fp8_flops / device.fp8_rate,
        work.bytes_moved / (device.bandwidth_tbs * 1e12 * device.bandwidth_share),
        exposed,
        behind,
        work.operators * device.operator_us / 1e6,
    )


def step_time(experiment: Experiment, times: Sequence[RankTime | None]) -> tuple[float, float | None]:
    """The pipeline's bubble, and the seconds of a step; the slowest rank has the word."""
    known = [time.total for time in times if time is not None]
    if experiment.parallelism.pp == 1:
        return 0.0, max(known, default=None)
    layout = ResolvedLayout.of(experiment)
    parallelism, stages = experiment.parallelism, len(layout.stage_layers)
    orders = build_schedule(parallelism.pp_schedule, parallelism.pp, stages, layout.pipeline_microbatches)
    bubble = timeline(orders).bubble
    return bubble, max(known) / (1 - bubble) if known else None


def message_seconds(kind: str, size: int, ranks: Sequence[int], device: Device, node: int) -> float:
    """Of one rank's messages of a kind, by rings: each rank sends its share on until all have what they need."""
    if kind == "receive" or len(ranks) < 2:
        return 0.0  # counted where it is sent
    nodes = len({rank // node for rank in ranks})
    # Between nodes, all adapters of the group's ranks carry a part of what a node needs.
    rate = device.link_gbs if nodes == 1 else min(device.link_gbs, device.network_gbs * len(ranks) / nodes)
    rate *= 1e9 * device.link_share
    others = (len(ranks) - 1) / len(ranks)
    share = {"all-gather": others, "reduce-scatter": others, "all-to-all": others, "all-reduce": 2 * others}
    return size * share.get(kind, 1.0) / rate
