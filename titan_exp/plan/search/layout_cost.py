"""Step time and memory of a layout: extrapolated totals, which may be scaled from another number of shards; or planned.

Totals know allocated tensors only. A plan replays the allocator as the gate does, and decides.
"""

from dataclasses import dataclass

from titan_exp.config.errors.user_error import shown
from titan_exp.config.layout.schedule_timeline import pipeline_seconds
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.device_memory import room_of
from titan_exp.plan.extrapolate.stages import stages_of
from titan_exp.plan.extrapolate.step_cost import StepCost, TracedParts, simulate_rank, step_cost
from titan_exp.plan.predict import predict
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.supported import with_run_kernels
from titan_exp.plan.synchronization import exchange_seconds
from titan_exp.plan.time.roofline import axis_ranks, pipeline_bubble, rank_time
from titan_exp.tracking.number_format import format_bytes

NEARLY_FULL = 0.03
"""Share of the room that must be left for pipeline ranks in the middle not to be planned, which need less."""


@dataclass(frozen=True)
class LayoutCost:
    """Extrapolated cost of a layout."""

    candidate: Candidate
    """The layout."""
    step_seconds: float
    """Step time."""
    bubble: float
    """Pipeline bubble as a share of the step."""
    peak_bytes: int
    """Peak of allocated tensors on the fullest rank."""
    peak_rank: int
    """Pipeline rank of the peak."""
    peak_where: str
    """Phase of the peak, e.g. `forward, block 3`."""
    room: int
    """Device memory without the CUDA context and NCCL's buffers."""
    reserved: int | None = None
    """Peak of the allocator's reserved memory, as planned; None for totals."""
    retries: int = 0
    """Allocations that find the device full and give cached memory back."""

    @property
    def needed(self) -> int:
        """Bytes that the room must have: those of tensors until the layout is planned."""
        return self.peak_bytes if self.reserved is None else self.reserved

    @property
    def fits(self) -> bool:
        """True if the gate lets the layout start, or may do so if it is not planned."""
        return self.needed <= self.room

    def __str__(self) -> str:
        size = f"{format_bytes(self.needed)} {'of tensors, not planned yet' if self.reserved is None else 'reserved'}"
        values = (f"{short_key(key)}={shown(value)}" for key, value in self.candidate.values.items())
        degrees = " ".join(value for value in values if not value.endswith("=1"))
        return f"{self.tokens_per_second:,.0f} tokens/s/GPU, {size}: {degrees}"

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        training = self.candidate.experiment.training
        return training.global_batch_size * training.seq_len / self.step_seconds / self.candidate.layout.devices


def layout_cost(candidate: Candidate, sampled: Candidate, parts: TracedParts, device: Device) -> LayoutCost:
    """Cost of a layout from traced parts of a sampled layout, which may differ in the number of shards."""
    layout, totals, peak = candidate.layout, dict[int, float](), (-1, 0, "")
    device = with_run_kernels(device, candidate.experiment)
    bubble = pipeline_bubble(layout)
    for rank in extreme_ranks(candidate.parallelism.pp):
        step = _step_cost(candidate, rank, parts)
        axes = axis_ranks(candidate.parallelism, rank, step.costs)
        seconds, scale = rank_time(step.costs, axes, device, layout.node_size).total, sampled.shards / candidate.shards
        weights = scale * step.persistent["parameters"]
        totals[rank] = seconds + exchange_seconds(candidate.experiment, weights, device, seconds)
        persistent = round(sum(step.persistent.values()) * (scale - 1))
        # The matmul library keeps one workspace each for the forward and the backward thread.
        peak = max(peak, (step.peak.bytes + persistent + 2 * device.matmul_workspace, rank, step.peak.where))
    return LayoutCost(
        candidate, pipeline_seconds(totals, candidate.parallelism.pp, bubble), bubble, *peak, room_of(layout, device)
    )


def planned_cost(candidate: Candidate, device: Device) -> LayoutCost:
    """Cost of a layout as `titan-exp plan` predicts it, and the gate decides about it."""
    room, degree = room_of(candidate.layout, device), candidate.parallelism.pp
    plan = predict(candidate.experiment, device, extreme_ranks(degree), cores=1)
    ranks = plan.ranks
    if len(ranks) < degree and (1 - NEARLY_FULL) * room < max(rank.bytes for rank in ranks) <= room:
        others = set(range(degree)) - set(extreme_ranks(degree))
        ranks += predict(candidate.experiment, device, others, cores=1).ranks
    largest = max(ranks, key=lambda rank: rank.bytes)
    assert plan.step_seconds is not None, "the device's rates are known"
    assert largest.allocator is not None, "it is planned for CUDA"
    peak, retries = largest.trace.peak, max(rank.allocator.retries for rank in ranks if rank.allocator is not None)
    where = largest.pipeline_rank, peak.where, room
    return LayoutCost(candidate, plan.step_seconds, plan.bubble, peak.bytes, *where, largest.bytes, retries)


def extreme_ranks(degree: int) -> list[int]:
    """Pipeline ranks that include the fullest and the slowest.

    Ranks between the second and the last keep fewer micro-batches in flight than the second, and have no more layers.
    """
    return sorted({0, min(1, degree - 1), degree - 1})


def _step_cost(candidate: Candidate, rank: int, parts: TracedParts) -> StepCost:
    stages = stages_of(candidate.experiment, rank)
    simulation = simulate_rank(candidate.layout, rank, parts.samples)
    return step_cost(candidate.layout, stages, parts, simulation)


def short_key(key: str) -> str:
    """Last word of a searched key, or its group if that is switched on."""
    return key.removesuffix(".enabled").rpartition(".")[2]
