"""Run status from files and locks, then from the executor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, JobStatus, RunPlan, executor_for, size_text, trusted_executor
from titan_exp.tracking.number_format import format_duration
from titan_exp.tracking.run_folder.run import ENDED, Run, RunStatus
from titan_exp.tracking.run_folder.run_folder import RunFolder


def run_statuses(folders: Sequence[RunFolder | Run]) -> dict[Path, RunStatus]:
    """Status of each run by folder path. Each executor is queried once, for all its unfinished runs."""
    statuses: dict[Path, RunStatus] = {}
    unsure: dict[str, list[Run]] = {}
    for run in (found if isinstance(found, Run) else Run(found) for found in folders):
        path = run.folder.path
        try:
            statuses[path] = run.status
            if run.state is not None and run.state.state != "done" and run.attempts:
                unsure.setdefault(trusted_executor(run.folder, run.attempts[-1].launched_by), []).append(run)
        except UserError as error:
            statuses[path] = RunStatus("unreadable", 0, str(error), 0)
    for kind, of_kind in unsure.items():
        job_statuses = _job_statuses(kind, [run.folder for run in of_kind])
        for run in of_kind:
            statuses[run.folder.path] = _merge(run, job_statuses.get(run.folder.path))
    return statuses


def run_status(folder: RunFolder) -> RunStatus:
    """Status of one run."""
    return run_statuses([folder])[folder.path]


def count_states(states: Sequence[str]) -> str:
    """Format counts of states: `3 done, 1 failed`."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def print_dry_run(executor: Executor, plan: RunPlan) -> None:
    """Print what submitting a run would do, and its job script; writes nothing."""
    folder, layout = plan.folder, plan.layout
    status = run_status(folder) if folder.path.exists() else None
    if status is None or status.state == "new":
        print(f"would start {folder.path}, {size_text(layout)}, to step {plan.experiment.training.last_step}")
    elif status.state == "done" or status.active:
        print(f"would start nothing: {folder.path} is {status.state}, after step {status.step}")
    else:
        print(f"would continue {folder.path}, {status.state} after step {status.step}, {size_text(layout)}")
    script = executor.script(plan)
    if script is not None:
        print(f"\n{script}", end="")


def _job_statuses(kind: str, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
    try:
        return executor_for(kind).status(folders)
    except UserError:
        return {}  # the executor's class is not importable here


def _merge(run: Run, job: JobStatus | None) -> RunStatus:
    """Merge the job status into the status from files."""
    status = run.status
    if job is None:
        return status
    step, attempt, job_id = status.step, status.attempt, job.job_id or status.job_id
    if job.state == "unknown":
        last, beat = run.attempts[-1], run.heartbeat
        if status.state in ENDED and last.end is not None:
            return status
        seen = (
            "" if beat is None else f"; last heartbeat {format_duration(round(beat.age))} ago, after step {beat.step}"
        )
        reason = f"{last.launched_by} cannot be asked: {job.reason}{seen}"
        return RunStatus("unknown", step, reason, attempt, job_id)
    if job.state in ("queued", "running"):
        # Until a requeued run starts again, its files describe the previous attempt.
        return RunStatus(job.state, step, job.reason, attempt, job_id)
    if status.state in ("new", "running"):
        return RunStatus("lost", step, job.reason or "the scheduler ended or forgot its job", attempt, job_id)
    return RunStatus(status.state, step, status.reason or job.reason, attempt, job_id)
