"""Retry failed and lost runs in their existing folders, by their configured executors."""

from collections.abc import Mapping
from pathlib import Path

from titan_exp.launch.executor import Submission, SubmitOptions, executor_for, worst_exit_code
from titan_exp.launch.memory_gate import gate_runs
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan, plan_relaunch
from titan_exp.tracking.run_folder.run_folder import RunFolder


def retry_runs(labels: Mapping[Path, str], *, trust: bool = False) -> int:
    """Restart runs by folder path and print each result under its label; returns the exit code. Raises UserError if a
    run cannot start or is not expected to fit."""
    by_kind: dict[str, list[RunPlan]] = {}
    for path in labels:
        plan = plan_relaunch(RunFolder(path), trust)
        by_kind.setdefault(plan.experiment.cluster.kind, []).append(plan)
    console, submissions = RunConsole(), list[Submission]()
    by_kind = {kind: gate_runs(plans, console.echo) for kind, plans in by_kind.items()}
    options = SubmitOptions(echo=console.echo, title=lambda plan: labels[plan.folder.path])
    for executor in sorted(map(executor_for, by_kind), key=lambda executor: executor.waits):
        results = executor.submit(by_kind[executor.kind], options)
        submissions += results
        for submission in results if not executor.waits else ():
            job = f", job {submission.job_id}" if submission.job_id else ""
            reason = f": {submission.reason}" if submission.reason else ""
            console.echo(f"{options.title(submission.plan)}: {submission.outcome}{job}{reason}")
    return worst_exit_code(submissions)
