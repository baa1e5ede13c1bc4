"""What a layout takes, from profiles that were traced for it or for one that differs in the number of shards alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import timeline
from titan_exp.models.spec.lookup import model_spec
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.extrapolate.schedule_simulation import ScheduleSimulation, simulate_schedule
from titan_exp.plan.extrapolate.step_cost import TracedParts, step_cost
from titan_exp.plan.time.roofline import rank_time
from titan_exp.plan.trace.dispatch_mode import OpCosts

SAFETY_FACTOR, SAFETY_FACTOR_VIEWS = 0.95, 0.85
"""Of what is of tokens, where it follows from a profile of other degrees; and where that has several heads of keys and
a rank of the layout only one, so that copies become views."""


@dataclass(frozen=True)
class LayoutCost:
    """A layout, and what it takes."""

    experiment: Experiment
    """With this layout."""
    step_seconds: float
    """Of a step."""
    bubble: float
    """Share of the time in which pipeline ranks wait for each other."""
    peak_bytes: int
    """Allocated, of the rank that needs most."""
    peak_rank: int
    """Its number along pp."""
    peak_where: str
    """What it computes then."""

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        training = self.experiment.training
        world_size = ResolvedLayout.of(self.experiment).world_size
        return training.global_batch_size * training.seq_len / self.step_seconds / world_size


@dataclass(frozen=True)
class Traced:
    """Work of a rank, as the roofline reads it."""

    costs: OpCosts
    """Operations, bytes and messages of a step."""
    axes: dict[str, list[int]]
    """Ranks of its group along every axis that it sends messages on."""


def layout_cost(experiment: Experiment, sampled: Experiment, parts: TracedParts, device: Device) -> LayoutCost:
    """What a layout takes.

    Args:
        experiment: with this layout.
        sampled: the one that the parts were traced for.
        parts: its profile.
        device: what it runs on.
    """
    bubble = bubble_of(experiment)
    node, seconds, most = ResolvedLayout.of(experiment).node_size, 0.0, (-1, 0, "")
    for rank in ranks_that_matter(experiment.parallelism.pp):
        step = step_cost(experiment, rank, parts, _rehearsal(experiment, rank, parts))
        time = rank_time(Traced(step.costs, axes_of(experiment, rank, step.costs)), device, node)
        seconds = max(seconds, time.total)
        peak = step.peak.bytes + round(sum(step.persistent.values()) * (_shards(sampled) / _shards(experiment) - 1))
        # What the matmuls' library keeps for the forward pass's thread and for the backward pass's.
        most = max(most, (peak + 2 * device.matmul_workspace, rank, step.peak.where))
    return LayoutCost(experiment, seconds / (1 - bubble), bubble, *most)


def safety_factor(experiment: Experiment, sampled: Experiment) -> float:
    """Which part of what follows from a profile a layout takes at least."""
    views = sampled.parallelism.tp < kv_heads(experiment) <= experiment.parallelism.tp
    return SAFETY_FACTOR_VIEWS if views else SAFETY_FACTOR


def kv_heads(experiment: Experiment) -> int:
    """Heads of keys and values, which ranks of more tensor parallelism share."""
    spec = model_spec(experiment.model)
    return 1 if spec is None or spec.attention is None else spec.attention.kv_heads


def peak_lower_bound(experiment: Experiment, sampled: Experiment, parts: TracedParts) -> float:
    """Bytes that the fullest rank of a layout holds at least, from a profile of smaller degrees or equal ones.

    What is of tokens is divided by tensor and context parallelism and by the micro-batch at most, and what is of
    parameters by tensor parallelism and sharding.
    """
    own, other = experiment.parallelism, sampled.parallelism
    if own.pp > 1 and False not in parts.stage_samples:
        return 0.0
    # A stage of one block has at least what the first of several has.
    parts = (
        replace(parts, stage_samples={True: parts.stage_samples[False], **parts.stage_samples}) if own.pp > 1 else parts
    )
    of_parameters = other.tp / own.tp if other.tp <= own.tp else 0.5
    sharded = of_parameters * _shards(sampled) / _shards(experiment)
    sequences = ResolvedLayout.of(experiment).micro_batch_size / ResolvedLayout.of(sampled).micro_batch_size
    tokens = of_parameters * other.cp / own.cp * sequences * safety_factor(experiment, sampled)
    share = {
        "parameters": sharded,
        "optimizer": sharded,
        "gradients": min(of_parameters, sharded),
        "gathered parameters": of_parameters,
        # Some buffers of messages are of parameters.
        "communication": tokens / max(1.0, sequences),
    }
    most = 0.0
    for rank in ranks_that_matter(own.pp):
        held = step_cost(experiment, rank, parts, _rehearsal(experiment, rank, parts)).peak.by_category
        most = max(most, sum(size * share.get(name, tokens) for name, size in held.items()))
    return most


def ranks_that_matter(degree: int) -> list[int]:
    """Pipeline ranks of which one needs the most memory and one the most time.

    Those in between hold fewer micro-batches than the second, and no more layers.
    """
    return sorted({0, min(1, degree - 1), degree - 1})


def bubble_of(experiment: Experiment) -> float:
    """Share of the time in which pipeline ranks wait for each other."""
    parallelism = experiment.parallelism
    layout = ResolvedLayout.of(experiment)
    return (
        _schedule(parallelism.pp_schedule, parallelism.pp, layout.stage_count, layout.pipeline_microbatches)[1]
        if parallelism.pp > 1
        else 0.0
    )


def axes_of(experiment: Experiment, pipeline_rank: int, work: OpCosts) -> dict[str, list[int]]:
    """Ranks of the first rank's group along every axis that work sends messages on, in the order of `parallel.mesh`."""
    parallelism = experiment.parallelism
    within = parallelism.ulysses_degree
    shape = (
        parallelism.pp,
        parallelism.dp_replicate,
        parallelism.dp_shard,
        parallelism.cp // within,
        within,
        parallelism.tp,
    )
    names = ("pp", "dp_replicate", "dp_shard", "cp_across", "cp_within", "tp")
    ranks = np.arange(int(np.prod(shape))).reshape(shape)
    found = {}
    for axis, _ in work.messages:
        along = ("dp_shard", "cp_across", "cp_within") if "fsdp" in axis.split("=") else (axis.split("=")[0],)
        at = tuple(slice(None) if name in along else pipeline_rank if name == "pp" else 0 for name in names)
        found[axis] = ranks[at].flatten().tolist()
    return found


def _shards(experiment: Experiment) -> int:
    return experiment.parallelism.dp_shard * experiment.parallelism.cp


def _rehearsal(experiment: Experiment, rank: int, parts: TracedParts) -> ScheduleSimulation | None:
    if experiment.parallelism.pp == 1:
        return None
    sample, parallelism = next(iter(parts.stage_samples.values()))[0], experiment.parallelism
    layout = ResolvedLayout.of(experiment)
    return _rehearsed(
        parallelism.pp_schedule,
        parallelism.pp,
        tuple(layout.stage_placement),
        layout.pipeline_microbatches,
        rank,
        sample.sends_complete,
    )


@cache
def _rehearsed(  # noqa: PLR0917  # a cache takes arguments by place
    schedule: str, ranks: int, placement: Sequence[int], microbatches: int, rank: int, sends_complete: bool
) -> ScheduleSimulation:
    orders, _ = _schedule(schedule, ranks, len(placement), microbatches)
    return simulate_schedule(orders, placement, rank, passes=1, sends_complete=sends_complete)


@cache
def _schedule(schedule: str, ranks: int, stages: int, microbatches: int) -> tuple[Schedule, float]:
    orders = build_schedule(schedule, ranks, stages, microbatches)
    return orders, timeline(orders).bubble
