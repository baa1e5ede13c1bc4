"""Trace of a planned step for Perfetto (ui.perfetto.dev) and chrome://tracing, in Chrome's trace event format.

One process per pipeline rank, with its schedule as on the page: all actions of the step, in the order of execution.
"""

import json
from collections.abc import Iterator
from typing import Any

from titan_exp.config.layout.schedule_timeline import COST, timeline
from titan_exp.plan.predict import Plan
from titan_exp.plan.visualize.schedule_data import schedule_of, stage_seconds

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
"""Names of actions by kind."""
UNIT_US = 1000.0
"""Microseconds of a forward pass where no rates are known."""


def trace_json(plan: Plan) -> str:
    """Trace of a plan's step as JSON."""
    known = plan.step_seconds is not None
    unit = "estimated from the device's rates" if known else "one millisecond for each forward pass"
    title = f"{plan.experiment.model.name} on {plan.layout.world_size}: planned step, {unit}"
    found = {"traceEvents": list(_events(plan)), "displayTimeUnit": "ms", "otherData": {"title": title}}
    return json.dumps(found) + "\n"


def _events(plan: Plan) -> Iterator[dict[str, Any]]:
    schedule = schedule_of(plan.layout)
    seconds = stage_seconds(plan, schedule)
    scale = 1e6 if plan.step_seconds is not None else UNIT_US
    line = timeline(schedule.orders, seconds)
    whole = max(line.end.values())
    for rank, order in enumerate(schedule.orders):
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
        for turn in range(schedule.passes):
            for action in order:
                took = COST[action.kind] * seconds[action.stage]
                yield {
                    "ph": "X",
                    "pid": rank,
                    "tid": 0,
                    "cat": NAMES[action.kind],
                    "name": f"{NAMES[action.kind]}, micro-batch {action.microbatch}",
                    "ts": round((turn * whole + line.end[action] - took) * scale, 3),
                    "dur": round(took * scale, 3),
                    "args": {"stage": action.stage, "micro-batch": action.microbatch, "pass": turn},
                }
