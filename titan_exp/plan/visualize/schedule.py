"""Pipeline schedule over time, for the page, and as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, in
Chrome's trace event format, with one process per pipeline rank."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.layout.schedule_timeline import COST, Timeline, timeline
from titan_exp.plan.predict import Plan
from titan_exp.plan.roofline import schedule_and_bubble

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
"""Names of actions by kind."""
UNIT_US = 1000.0
"""Microseconds of a forward pass where no rates are known."""
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

    def timeline(self, plan: Plan) -> tuple[Timeline, list[float]]:
        """Timeline of a pass, and seconds of a forward pass of each stage; 1 if the rates of the device are unknown."""
        costs = [1.0] * len(self.placement)
        if plan.step_seconds is not None:
            # Stages of a rank are equal.
            pass_seconds = plan.step_seconds * (1 - plan.bubble) / self.passes
            units = [sum(COST[action.kind] for action in order) for order in self.orders]
            costs = [pass_seconds / units[rank] for rank in self.placement]
        return timeline(self.orders, costs), costs


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
    line, costs = schedule.timeline(plan)
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


def trace_json(plan: Plan) -> str:
    """Trace of a plan's step, with the schedule of the page, as JSON."""
    known = plan.step_seconds is not None
    unit = "estimated from the device's rates" if known else "one millisecond for each forward pass"
    title = f"{plan.experiment.model.name} on {plan.layout.world_size}: planned step, {unit}"
    found = {"traceEvents": list(_events(plan)), "displayTimeUnit": "ms", "otherData": {"title": title}}
    return json.dumps(found) + "\n"


def _events(plan: Plan) -> Iterator[dict[str, Any]]:
    schedule, scale = schedule_of(plan.layout), UNIT_US if plan.step_seconds is None else 1e6
    line, seconds = schedule.timeline(plan)
    whole = max(line.end.values())
    for rank, order in enumerate(schedule.orders):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
        for turn in range(schedule.passes):
            for action in order:
                took, name = COST[action.kind] * seconds[action.stage], NAMES[action.kind]
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": 0,
                    "cat": name,
                    "name": f"{name}, micro-batch {action.microbatch}",
                    "ts": round((turn * whole + line.end[action] - took) * scale, 3),
                    "dur": round(took * scale, 3),
                    "args": {"stage": action.stage, "micro-batch": action.microbatch, "pass": turn},
                }
