"""What a user reads after submitting: what became of each run, and the lines to type next."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titan_exp.launch.executor import Submission
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.slurm.executor import SlurmExecutor
from titan_exp.launch.slurm.submit import resources_of

SHOWN = 20
"""Runs of a sweep that get a line each."""


def submit(plans: Sequence[RunPlan], labels: Sequence[str] = ()) -> int:
    """Submit runs and say so. Returns 0, or 2 where one was refused.

    Args:
        plans: the runs.
        labels: what tells them apart, where they are a sweep's.
    """
    submissions = SlurmExecutor().submit(plans, say=print)
    for number, submission in enumerate(submissions):
        if number < SHOWN or submission.outcome == "refused":
            stream = sys.stderr if submission.outcome == "refused" else sys.stdout
            label = f"{labels[number]}: " if labels else ""
            print(label + line(submission), file=stream)
    if len(submissions) > 1:
        counted = Counter(submission.outcome for submission in submissions)
        print(", ".join(f"{count} {outcome}" for outcome, count in counted.items()))
    for text in commands(submissions):
        print(f"  {text}")
    return 2 if any(submission.outcome == "refused" for submission in submissions) else 0


def line(submission: Submission) -> str:
    """What became of one run."""
    resources = resources_of(submission.plan)
    nodes, tasks = resources.nodes, resources.tasks_per_node
    job = "" if submission.job_id is None else f" job {submission.job_id}"
    reason = "" if submission.reason is None else f" ({submission.reason})"
    asked = f", {nodes} node{'s' * (nodes > 1)} with {tasks} process{'es' * (tasks > 1)} each"
    return (
        f"{submission.outcome}{job}{asked if submission.outcome == 'submitted' else ''}{reason}: "
        f"{_short(submission.plan.folder.path)}"
    )


def commands(submissions: Sequence[Submission]) -> list[str]:
    """What to type next, for a run or for the folder of a sweep's runs."""
    alive = [it for it in submissions if it.outcome in ("submitted", "queued", "running")]
    if not alive:
        return []
    folders = [it.plan.folder.path for it in alive]
    parents = {folder.parent for folder in folders}
    named = _short(folders[0] if len(folders) == 1 or len(parents) > 1 else parents.pop())
    return [
        f"titan-exp status {named}",
        f"titan-exp logs -f {_short(folders[0])}",
        f"titan-exp cancel {named}",
    ]


def _short(path: Path) -> str:
    """A path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
