"""Runs as JSON values, for `--json` of the verbs that start or stop runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from titan_exp.launch.executor import RunPlan, Submission
from titan_exp.launch.requests import gpu_hours, scripts
from titan_exp.launch.state.run_lookup import RunEntry
from titan_exp.launch.state.run_status import status_rows

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
