"""Pipeline schedule over time: start and end of every action of each pipeline rank, in execution order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import COST, timeline
from titan_exp.plan.predict import Plan
from titan_exp.plan.time.roofline import schedule_and_bubble

MIN_GAP = 1e-6
"""Minimum idle time as a share of a forward pass; less is rounding."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Schedule of one pass of micro-batches."""

    orders: Schedule
    """Actions of each pipeline rank."""
    placement: list[int]
    """Pipeline rank of each stage."""
    passes: int
    """Passes through the pipeline per step."""


def schedule_of(layout: ResolvedLayout) -> PipelineSchedule:
    """Schedule of a layout, with or without a pipeline."""
    parallelism, micro_batches = layout.parallelism, layout.gradient_accumulation
    if parallelism.pp == 1:
        return PipelineSchedule([[Action(0, kind, number) for number in range(micro_batches) for kind in "FB"]], [0], 1)
    placement, together = layout.stage_placement, layout.pipeline_microbatches
    orders, _ = schedule_and_bubble(parallelism.pp_schedule, parallelism.pp, len(placement), together)
    return PipelineSchedule(orders, placement, micro_batches // together)


def schedule_data(plan: Plan) -> dict[str, Any]:
    """Schedule as JSON: actions and idle times of each rank as text; in units if no time of a rank is known.

    Every stage takes equally long, so that the last action ends with the plan's step.
    """
    schedule = schedule_of(plan.layout)
    costs = stage_seconds(plan, schedule)
    line = timeline(schedule.orders, costs)
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


def stage_seconds(plan: Plan, schedule: PipelineSchedule) -> list[float]:
    """Seconds of a forward pass of each stage; 1 if the rates of the device are unknown."""
    if plan.step_seconds is None:
        return [1.0] * len(schedule.placement)
    # Stages of a rank are equal.
    pass_seconds = plan.step_seconds * (1 - plan.bubble) / schedule.passes
    units = [sum(COST[action.kind] for action in order) for order in schedule.orders]
    return [pass_seconds / units[rank] for rank in schedule.placement]


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
