"""Console report of a submitted run, with the commands to type next."""

import os
import sys
from pathlib import Path

from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.launch.executor import Submission


def print_submission(submission: Submission) -> None:
    """Print the outcome of one run, a refusal to stderr, and the commands that follow up an active run."""
    layout, name = ResolvedLayout.of(submission.plan.experiment), _relative(submission.plan.folder.path)
    nodes, tasks = layout.nodes, min(layout.world_size, layout.node_size)
    line = submission.outcome + (f" job {submission.job_id}" if submission.job_id else "")
    if submission.outcome == "submitted":
        line += f", {nodes} node{'s' * (nodes > 1)} with {tasks} process{'es' * (tasks > 1)} each"
    if submission.reason:
        line += f" ({submission.reason})"
    print(f"{line}: {name}", file=sys.stderr if submission.outcome == "refused" else sys.stdout)
    if submission.outcome in ("submitted", "queued", "running"):
        print(f"  titan-exp status {name}\n  titan-exp logs -f {name}\n  titan-exp cancel {name}")


def _relative(path: Path) -> str:
    """The path as typed from the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
