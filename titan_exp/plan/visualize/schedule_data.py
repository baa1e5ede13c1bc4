"""The pipeline's schedule drawn to time: what each pipeline rank does when, as the executor runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import COST, timeline
from titan_exp.parallel.pipeline_parallel.schedule_actions import build_schedule
from titan_exp.plan.predict import Plan

SMALLEST_GAP = 1e-6
"""Idle time, as a share of a forward pass, that rounding does not make."""


@dataclass(frozen=True)
class PipelineSchedule:
    """One pass of a step's micro-batches."""

    orders: Schedule
    """Actions of each pipeline rank."""
    placement: list[int]
    """The pipeline rank of each stage."""
    passes: int
    """How many such passes a step has, one after the other."""


def schedule_of(experiment: Experiment) -> PipelineSchedule:
    """What the ranks of a pipeline do, or one that has none; the layout must be resolved."""
    layout = ResolvedLayout.of(experiment)
    parallelism, micro_batches = experiment.parallelism, layout.gradient_accumulation
    if parallelism.pp == 1:
        return PipelineSchedule([[Action(0, kind, number) for number in range(micro_batches) for kind in "FB"]], [0], 1)
    placement, together = layout.stage_placement, layout.pipeline_microbatches
    orders = build_schedule(parallelism.pp_schedule, parallelism.pp, len(placement), together)
    return PipelineSchedule(orders, placement, micro_batches // together)


def schedule_data(plan: Plan) -> dict[str, Any]:
    """What the page draws: each rank's actions and idle times as words, in the ways that times are known."""
    schedule = schedule_of(plan.experiment)
    totals = {rank.pipeline_rank: rank.time.total for rank in plan.ranks if rank.time is not None}
    ways = []
    if len(totals) == len(schedule.orders):
        costs = [_forward_seconds(schedule, rank, totals[rank]) for rank in schedule.placement]
        ways.append(_way("own", schedule, costs))
    if totals and len(schedule.orders) > 1:
        # The plan's own estimate: all wait for the slowest rank.
        slowest = max(totals.values())
        costs = [_forward_seconds(schedule, rank, slowest) for rank in schedule.placement]
        ways.append(_way("alike", schedule, costs))
    ways = ways or [_way("units", schedule, [1.0] * len(schedule.placement))]
    return {
        "cost": COST,
        "placement": schedule.placement,
        "passes": schedule.passes,
        "microbatches": 1 + max(action.microbatch for order in schedule.orders for action in order),
        "ways": ways,
    }


def schedule_text(order: Sequence[Action], end: dict[Action, float], stage_costs: Sequence[float]) -> str:
    """A rank's actions, as in `2F0`, with idle times between, as in `~1.5`."""
    words, now = [], 0.0
    for action in order:
        cost = COST[action.kind] * stage_costs[action.stage]
        gap = end[action] - cost - now
        if gap > SMALLEST_GAP * max(stage_costs):
            words.append(f"~{gap:.6g}")
        words.append(str(action))
        now = end[action]
    return " ".join(words)


def _way(name: str, schedule: PipelineSchedule, costs: list[float]) -> dict[str, Any]:
    line = timeline(schedule.orders, costs)
    rows = [schedule_text(order, line.end, costs) for order in schedule.orders]
    return {"name": name, "costs": costs, "end": max(line.end.values()), "bubble": line.bubble, "rows": rows}


def _forward_seconds(schedule: PipelineSchedule, rank: int, total: float) -> float:
    """What a forward pass of one stage takes where a rank's whole step takes `total`, its stages being alike."""
    return total / schedule.passes / sum(COST[action.kind] for action in schedule.orders[rank])
