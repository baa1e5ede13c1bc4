"""Local executor: ranks as child processes; runs are sequential, or concurrent on separate cores."""

import os
from collections.abc import Sequence

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, Submission, SubmitOptions
from titan_exp.launch.local.concurrent_runs import ConcurrentRuns
from titan_exp.launch.local.run import INTERRUPTED, run
from titan_exp.launch.local.submitit_rank import submitit_rank
from titan_exp.launch.rank.rank_env import ATTEMPT, RankInfo
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.summary import describe, summarize
from titan_exp.tracking.run_folder.run_folder import RunFolder


class LocalExecutor(Executor):
    """Runs on this machine and waits for each run. Ranks rendezvous through a file."""

    waits = True

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        """Run every plan to its end, even if others fail; none starts after Ctrl-C or a stop request."""
        results = {number: _existing(plan) for number, plan in enumerate(plans)}
        for number, plan in enumerate(plans):
            submission = results[number]
            if submission is not None:
                text = "done already" if submission.outcome == "done" else submission.reason
                options.echo(f"[{number + 1}/{len(plans)}] {options.title(plan)}: {text}")
        waiting = [number for number, submission in results.items() if submission is None]
        run_all = _run_sequentially if options.jobs == 1 or len(waiting) < 2 else _run_concurrently
        results |= run_all(plans, waiting, options)
        return [
            results[number] or Submission(plan, "not started", exit_code=INTERRUPTED)
            for number, plan in enumerate(plans)
        ]

    def launch(self, plan: RunPlan) -> int:
        """Run one plan with a progress display."""
        return run(plan).exit_code

    def rank_info(self) -> RankInfo | None:
        """Rank started by submitit's local controller; None under another launcher."""
        return submitit_rank() if ATTEMPT in os.environ else None


def _run_sequentially(
    plans: Sequence[RunPlan], waiting: Sequence[int], options: SubmitOptions
) -> dict[int, Submission | None]:
    console, results = RunConsole(), {}
    for number in waiting:
        plan = plans[number]
        if options.stop_requested():
            break
        options.echo(f"\n[{number + 1}/{len(plans)}] {options.title(plan)}")
        try:
            outcome = run(plan, console=console)
        except UserError as error:
            console.error(str(error))
            results[number] = Submission(plan, "refused", reason=str(error), exit_code=error.exit_code)
            continue
        except KeyboardInterrupt:
            break
        results[number] = _submission(plan, outcome.summary.state, outcome.exit_code)
        if outcome.exit_code == INTERRUPTED:
            break
    return results


def _run_concurrently(
    plans: Sequence[RunPlan], waiting: Sequence[int], options: SubmitOptions
) -> dict[int, Submission | None]:
    numbers = {plans[number].folder.path: number for number in waiting}
    results: dict[int, Submission | None] = {}

    def heading(plan: RunPlan) -> str:
        return f"[{numbers[plan.folder.path] + 1}/{len(plans)}] {options.title(plan)}"

    def on_start(plan: RunPlan) -> None:
        options.echo(f"{heading(plan)}: started, {plan.folder.path}")

    def on_end(plan: RunPlan, code: int, refusal: str | None) -> None:
        summary = summarize(plan.folder)
        submission = _submission(plan, summary.state, code)
        if refusal:
            submission = Submission(plan, "refused", reason=refusal, exit_code=code)
        options.echo(f"{heading(plan)}: {refusal or describe(summary, plan.experiment.training.last_step)}")
        if submission.outcome == "failed":
            options.echo(f"    {submission.reason or f'exit code {code}'}\n    titan-exp logs {plan.folder.path}")
        results[numbers[plan.folder.path]] = submission

    runs = ConcurrentRuns(options.jobs, on_start=on_start, on_end=on_end, stop_requested=options.stop_requested)
    runs.run([plans[number] for number in waiting], options.echo)
    return results


def _existing(plan: RunPlan) -> Submission | None:
    """Result of a run that is already done or running; None if it must be started."""
    if not plan.folder.path.exists():
        return None
    state = plan.folder.read_state()
    if state is not None and state.state == "done":
        return Submission(plan, "done")
    holder = plan.folder.holder()
    return None if holder is None else Submission(plan, "running", reason=f"already running ({holder}), left alone")


def _submission(plan: RunPlan, state: str, code: int) -> Submission:
    outcome = state if state in ("done", "preempted") else "failed"
    return Submission(plan, outcome, reason=_reason(plan.folder), exit_code=code)


def _reason(folder: RunFolder) -> str | None:
    state = folder.read_state()
    return None if state is None or state.state == "done" else state.reason
