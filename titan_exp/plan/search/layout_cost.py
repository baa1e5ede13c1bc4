"""Step time and memory of a layout, as `titan-exp plan` predicts it and the gate decides about it."""

from dataclasses import dataclass

from titan_exp.config.errors.user_error import shown
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.device_memory import room_of
from titan_exp.plan.extrapolate.sample import Samples
from titan_exp.plan.predict import predict
from titan_exp.plan.search.layouts import Candidate
from titan_exp.tracking.number_format import format_bytes

NEARLY_FULL = 0.03
"""Share of the room that must be left for pipeline ranks in the middle not to be planned, which need less."""


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

    @property
    def fits(self) -> bool:
        """True if the gate lets the layout start."""
        return self.reserved <= self.room

    def __str__(self) -> str:
        values = (f"{short_key(key)}={shown(value)}" for key, value in self.candidate.values.items())
        degrees = " ".join(value for value in values if not value.endswith("=1"))
        return f"{self.tokens_per_second:,.0f} tokens/s/GPU, {format_bytes(self.reserved)} reserved: {degrees}"

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        training = self.candidate.experiment.training
        return training.global_batch_size * training.seq_len / self.step_seconds / self.candidate.layout.devices


def planned_cost(candidate: Candidate, device: Device) -> tuple[LayoutCost, Samples | None]:
    """Cost of a layout, and the samples from which it is extrapolated. Raises ExtrapolationError if it cannot be."""
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
    where = largest.pipeline_rank, peak.where, room
    cost = LayoutCost(candidate, plan.step_seconds, plan.bubble, peak.bytes, *where, largest.bytes, retries)
    return cost, plan.samples


def short_key(key: str) -> str:
    """Last word of a searched key, or its group if that is switched on."""
    return key.removesuffix(".enabled").rpartition(".")[2]
