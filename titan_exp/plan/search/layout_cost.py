"""Step time and peak memory of a layout, extrapolated from traces of the same layout with another number of shards."""

from dataclasses import dataclass, replace

from titan_exp.config.layout.schedule_timeline import pipeline_seconds
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.stages import stages_of
from titan_exp.plan.extrapolate.step_cost import StepCost, TracedParts, simulate_rank, step_cost
from titan_exp.plan.search.layouts import Candidate
from titan_exp.plan.time.roofline import axis_ranks, pipeline_bubble, rank_time


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

    @property
    def tokens_per_second(self) -> float:
        """Throughput per device."""
        training = self.candidate.experiment.training
        return training.global_batch_size * training.seq_len / self.step_seconds / self.candidate.layout.world_size


def layout_cost(candidate: Candidate, sampled: Candidate, parts: TracedParts, device: Device) -> LayoutCost:
    """Cost of a layout from traced parts of a sampled layout, which may differ in the number of shards."""
    layout, totals, peak = candidate.layout, dict[int, float](), (-1, 0, "")
    bubble = pipeline_bubble(layout)
    for rank in extreme_ranks(candidate.parallelism.pp):
        step = _step_cost(candidate, rank, parts)
        axes = axis_ranks(candidate.parallelism, rank, step.costs)
        totals[rank] = rank_time(step.costs, axes, device, layout.node_size).total
        persistent = round(sum(step.persistent.values()) * (sampled.shards / candidate.shards - 1))
        # The matmul library keeps one workspace each for the forward and the backward thread.
        peak = max(peak, (step.peak.bytes + persistent + 2 * device.matmul_workspace, rank, step.peak.where))
    return LayoutCost(candidate, pipeline_seconds(totals, candidate.parallelism.pp, bubble), bubble, *peak)


def extreme_ranks(degree: int) -> list[int]:
    """Pipeline ranks that include the fullest and the slowest.

    Ranks between the second and the last keep fewer micro-batches in flight than the second, and have no more layers.
    """
    return sorted({0, min(1, degree - 1), degree - 1})


def _step_cost(candidate: Candidate, rank: int, parts: TracedParts) -> StepCost:
    edge = next(iter(parts.samples.values()))[0].edge
    stages = [replace(stage, edge=edge) for stage in stages_of(candidate.experiment, rank)]
    simulation = simulate_rank(candidate.layout, rank, parts.samples)
    return step_cost(candidate.layout, stages, parts, simulation)
