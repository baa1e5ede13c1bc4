"""Requests of runs to a scheduler (GPUs and hours in total, job scripts), and runs as JSON values for `--json`."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import listed
from titan_exp.launch.executor import Submission, executor_for, size_text
from titan_exp.launch.run_lookup import RunEntry
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.run_status import status_rows
from titan_exp.plan.gate import fits_unsharded


def hours(text: str) -> float:
    """Parse a time limit (M, M:S, H:M:S, D-H, D-H:M or D-H:M:S) to hours."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    in_hours = parts if dash or len(parts) == 3 else [0, *parts]
    return int(days or 0) * 24 + sum(part / 60**power for power, part in enumerate(in_hours))


def gpu_hours(plan: RunPlan) -> float | None:
    """Requested GPU-hours: time limit × GPUs; None without a limit or on CPU."""
    cluster = plan.experiment.cluster
    if cluster.time_limit is None or device_type(cluster) != "cuda":
        return None
    return hours(cluster.time_limit) * plan.layout.devices


def request_lines(plans: Sequence[RunPlan]) -> Iterator[str]:
    """GPUs and hours that runs ask of a scheduler, and how to ask for less if the layout of a small run only filled a
    node. Nothing for runs on CPU, or of an executor that waits: its GPUs are here anyway."""
    asking = [
        plan
        for plan in plans
        if device_type(plan.experiment.cluster) == "cuda" and not executor_for(plan.experiment.cluster.kind).waits
    ]
    if not asking:
        return
    counts = Counter((plan.layout.devices, plan.experiment.cluster.time_limit) for plan in asking)
    terms = []
    for (gpus, limit), count in counts.items():
        term = f"{gpus} GPU{'s' * (gpus > 1)} × {limit or 'the time limit of the site'}"
        terms.append(term if len(asking) == 1 else f"{count:,} × {term}")
    known = [value for plan in asking if (value := gpu_hours(plan)) is not None]
    total = f" = {sum(known):,.1f} GPU-hours" if len(known) == len(asking) else ""
    yield f"This asks for {' + '.join(terms)}{total}."
    small = [plan for plan in asking if plan.fills_node and not plan.folder.path.exists()]
    small = [plan for plan in small if fits_unsharded(plan.experiment, plan.folder.path.parents[1])]
    if small:
        took = listed(sorted({plan.experiment.parallelism.dp_shard for plan in small}))
        fewer = sorted({plan.layout.devices // plan.experiment.parallelism.dp_shard for plan in small})
        who, each = ("This run fits", "") if len(asking) == 1 else (f"{len(small)} of these runs fit", " each")
        yield (
            f"By an upper bound of {'its' if len(asking) == 1 else 'their'} memory, {who[0].lower()}{who[1:]} on "
            f"{listed(fewer)} GPU{'s' * (fewer[-1] > 1)}{each}, too: parallelism.dp_shard=1 asks for no more, where -1 "
            f"filled the nodes with {took} shards."
        )


def scripts(plans: Sequence[RunPlan]) -> Iterator[tuple[Sequence[RunPlan], str]]:
    """Job script of a run for each different request, with all runs that ask the same; none without scripts."""
    groups: dict[str, list[RunPlan]] = {}
    for plan in plans:
        groups.setdefault(repr((plan.layout.cluster, size_text(plan.layout))), []).append(plan)
    for group in groups.values():
        script = executor_for(group[0].experiment.cluster.kind).script(group[0])
        if script is not None:
            yield group, script


Records = list[dict[str, Any]]


def outcome_records(submissions: Sequence[Submission], labels: Sequence[str]) -> Records:
    """Row of `titan-exp status --json` of each run, with its outcome and exit code."""
    rows = _rows([submission.plan for submission in submissions], labels)
    return [
        row
        | {"outcome": submission.outcome, "exit_code": submission.exit_code}
        | {"reason": submission.reason or row["reason"], "job_id": submission.job_id or row["job_id"]}
        for row, submission in zip(rows, submissions, strict=True)
    ]


def planned_records(plans: Sequence[RunPlan], labels: Sequence[str]) -> Records:
    """Row of `titan-exp status --json` of each run, with the resources that it asks for and, in bytes and seconds, its
    prediction."""
    return [
        row
        | {"experiment_id": plan.experiment_id, "steps": plan.experiment.training.last_step}
        | {"processes": plan.layout.world_size, "nodes": plan.layout.nodes, "gpu_hours_asked": gpu_hours(plan)}
        | {"prediction": None if plan.prediction is None else json.loads(plan.prediction)}
        for row, plan in zip(_rows(plans, labels), plans, strict=True)
    ]


def script_records(plans: Sequence[RunPlan]) -> Records:
    """One job script for each different request, with the ids of the runs that ask the same."""
    return [{"run_ids": [plan.run_id for plan in group], "script": script} for group, script in scripts(plans)]


def run_label(plan: RunPlan) -> str:
    """Name of a run outside a study, by which other verbs find it."""
    return "/".join(plan.folder.path.parts[-2:])


def _rows(plans: Sequence[RunPlan], labels: Sequence[str]) -> Records:
    entries = [
        RunEntry(plan.folder, label, plan.folder.path.parent.name) for plan, label in zip(plans, labels, strict=True)
    ]
    return [asdict(row) for row in status_rows(entries)]
