"""Executor interface: submit, status and cancel for the submitter, rank and rendezvous for the ranks.

An executor is one folder with an `executor.py` (`launch/local`, `launch/slurm`) or a user's class. `cluster.kind` gives
the folder's name or the class's import path, and nothing else knows an executor by name.
"""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.builtins import executor_names
from titan_exp.config.groups.cluster import LOCAL
from titan_exp.config.schema.import_path import import_dotted, is_dotted
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.run_plan import RunPlan
from titan_exp.tracking.run_folder.run_folder import RunFolder


@dataclass(frozen=True)
class Submission:
    """Result of submitting one run."""

    plan: RunPlan
    outcome: Literal["submitted", "done", "queued", "running", "failed", "preempted", "refused", "not started"]
    """`submitted` now; `done`, `queued` or `running` already and left alone; the run's end if the executor waits for
    it; `refused` with a reason; or `not started` because of a signal or a stop request."""
    job_id: str | None = None
    reason: str | None = None
    """One line for the user."""
    exit_code: int = 0
    """The run's exit code if the executor waits for it, 2 if refused, 130 if not started."""


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `Executor.submit`."""

    echo: Callable[[str], None] = print
    title: Callable[[RunPlan], str] = lambda plan: str(plan.folder.path)
    """A run's name in lines for the user."""
    jobs: int = 1
    """Runs at a time, for executors that wait."""
    stop_requested: Callable[[], bool] = lambda: False
    """Checked before each start: True if no further run may start."""


@dataclass(frozen=True)
class JobStatus:
    """The scheduler's view of a run. The run folder holds the rest."""

    state: Literal["queued", "running", "gone", "unknown"]
    """`gone`: the scheduler ended or forgot the job; `unknown`: the scheduler did not answer."""
    job_id: str | None = None
    reason: str | None = None
    """Why the job waits, or how it ended."""


class Executor(ABC):
    """Starts runs somewhere, and tells each rank its place.

    Submitter and ranks are separate processes, so an executor keeps no state between them.
    """

    waits = False
    """True if `submit` returns only after the runs have ended."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        """`cluster.kind`, and `launched_by` of the attempts that it submits."""

    @abstractmethod
    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Start runs that are not done, queued or running; one result per plan, in order.

        Before a job exists, its intent is in the run's attempts.jsonl: `launched_by=self.kind`, and a token that the
        ranks find in `TITAN_EXP_TOKEN`.
        """

    def launch(self, plan: RunPlan) -> int:
        """Submit one run for `titan-exp train`; returns the exit code."""
        (submission,) = self.submit([plan], SubmitOptions())
        print_submission(submission)
        return submission.exit_code

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        """Job status by run folder path, in one query. Runs left out are known by their files and locks alone."""
        return {}

    def cancel(self, folders: Sequence[RunFolder], *, reason: str) -> Mapping[Path, str]:
        """Take waiting runs out of the queue, and let active ones save and stop; returns a line per folder path."""
        lines: dict[Path, str] = {}
        for folder in folders:
            holder = folder.holder()
            if holder is not None:
                folder.request_stop(reason)
            lines[folder.path] = "not running" if holder is None else f"asked to save and stop ({holder})"
        return lines

    @abstractmethod
    def rank_info(self) -> RankInfo | None:
        """This process's rank, from its environment; None if another launcher started it."""

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:  # noqa: B027  # optional
        """Choose the address at which ranks meet. Called on rank 0 before the attempt's start is recorded."""

    def join_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:  # noqa: B027  # optional
        """Set MASTER_ADDR and MASTER_PORT. Called on every rank after rank 0 recorded the start."""


def executor_for(kind: str) -> Executor:
    """Build the executor of a `cluster.kind`, or of an attempt's `launched_by`. Raises UserError if there is none."""
    if is_dotted(kind):
        return import_dotted(kind, "cluster.kind")(kind)
    kind = LOCAL if kind == BY_HAND else kind
    if kind not in executor_names():
        raise UserError(f"cluster.kind={kind}: no such executor. Built in: {', '.join(executor_names())}.")
    return import_dotted(f"titan_exp.launch.{kind}.executor.{kind.capitalize()}Executor", "cluster.kind")(kind)


def worst_exit_code(submissions: Sequence[Submission]) -> int:
    """0 if all are submitted or done, 130 after Ctrl-C, 1 if any failed or was refused, 85 if any stopped."""
    order = (0, 85, 1, 130)
    codes = [code if code in order else 1 for code in (submission.exit_code for submission in submissions)]
    return max(codes, key=order.index, default=0)


def print_submission(submission: Submission) -> None:
    """Print the outcome of one run, a refusal to stderr, and the next commands for an active run."""
    layout, name = submission.plan.layout, os.path.relpath(submission.plan.folder.path)
    if name.startswith(".."):
        name = str(submission.plan.folder.path)
    nodes, tasks = layout.nodes, min(layout.world_size, layout.node_size)
    line = submission.outcome + (f" job {submission.job_id}" if submission.job_id else "")
    if submission.outcome == "submitted":
        line += f", {nodes} node{'s' * (nodes > 1)} with {tasks} process{'es' * (tasks > 1)} each"
    if submission.reason:
        line += f" ({submission.reason})"
    print(f"{line}: {name}", file=sys.stderr if submission.outcome == "refused" else sys.stdout)
    if submission.outcome in ("submitted", "queued", "running"):
        print(f"  titan-exp status {name}\n  titan-exp logs -f {name}\n  titan-exp cancel {name}")


def last_executor(folder: RunFolder) -> str:
    """Kind of the executor that launched a run's last attempt; the default before the first."""
    attempts = folder.read_attempts()
    return attempts[-1].launched_by if attempts else LOCAL


BY_HAND = "hand"
"""`launched_by` of ranks started by torchrun, srun or a user; files and locks tell their status."""
