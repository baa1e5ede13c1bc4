"""Step time and peak memory of a layout, extrapolated from traces of the same layout with another number of shards."""

from dataclasses import dataclass, replace

from titan_exp.config.layout.schedule_timeline import pipeline_seconds
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.stages import FIRST, stages_of
from titan_exp.plan.extrapolate.step_cost import StepCost, TracedParts, simulate_rank, step_cost
from titan_exp.plan.search.comparable import safety_factor
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


def peak_lower_bound(candidate: Candidate, sampled: Candidate, parts: TracedParts) -> float:
    """Lower bound of the fullest rank's peak in bytes, from traces with smaller or equal degrees, but `ep`.

    Per-token bytes shrink at most by tp, cp and the micro-batch size, parameters at most by tp and shards.
    """
    own, other = candidate.parallelism, sampled.parallelism
    if False not in parts.samples or not sampled.replicated <= candidate.replicated:
        return 0.0
    # The first of several blocks is used for a stage's only block.
    parts = replace(parts, samples={True: parts.samples[False], **parts.samples})
    per_tp = other.tp / own.tp if other.tp <= own.tp else 0.5
    sharded = per_tp * sampled.shards / candidate.shards
    sequences = candidate.layout.micro_batch_size / sampled.layout.micro_batch_size
    tokens = per_tp * other.cp / own.cp * sequences * safety_factor(candidate, sampled)
    factors = {
        "parameters": sharded,
        "optimizer": sharded,
        "gradients": min(per_tp, sharded),
        "gathered parameters": per_tp,
        # Some communication buffers hold parameters.
        "communication": tokens / max(1.0, sequences),
    }
    ranks, sample = extreme_ranks(own.pp), parts.samples[False][0]
    repeated = min(sample.distinct + 2 * sample.edge, candidate.layout.layer_counts[0])
    if own.pp > 1 and sample.layers[FIRST] < repeated:
        # A small first stage was sampled as it is.
        ranks.remove(0)
    return max(
        sum(
            size * factors.get(name, tokens)
            for name, size in _step_cost(candidate, rank, parts).peak.by_category.items()
        )
        for rank in ranks
    )


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
