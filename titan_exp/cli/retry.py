"""Restart failed and lost runs in their folders."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import RetryOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.foreign_code import require_plain
from titan_exp.launch.executor import Submission, SubmitOptions, executor_for, worst_exit_code
from titan_exp.launch.memory_gate import gate_runs, outcome_records, request_lines
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_lookup import RunEntry, find_runs, require_one, runs_folder
from titan_exp.launch.run_plan import RunPlan, plan_relaunch
from titan_exp.launch.run_status import count_states, run_statuses
from titan_exp.tracking.run_folder.run_folder import RunFolder

USAGE = """\
titan-exp retry: start failed and lost runs again, each in its folder and from its last checkpoint.

  titan-exp retry NAME         those of a study
  titan-exp retry RUN ...      runs, by path, id prefix, STUDY/LABEL or URL
  titan-exp retry RUN key=value ...   a new run from the last checkpoint of one, with other values

A run keeps the configuration of its folder, and takes the code that you have now. A stopped run has not failed: to
continue it, type the command that started it."""
HELP_TEXT = options_help(USAGE, RetryOptions)
RETRIED = ("failed", "lost")
BEGINNING = ("checkpoint.continue_step=null", "checkpoint.continue_data=same", "checkpoint.initial=null")
"""Overrides that clear where the parent itself began."""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(RetryOptions, argv)
    overrides = [word for word in rest if _is_override(word)]
    runs, trust, named = runs_folder(options.runs), options.trust, [word for word in rest if word not in overrides]
    if not named:
        raise UserError("Name a run or a study: titan-exp retry NAME or RUN (titan-exp status lists failed ones).")
    if overrides:
        overrides = [*([f"paths.runs={options.runs}"] if options.runs else []), *overrides]
        overrides += ["--json"] if options.json else []
        return _continue_with(require_one(find_runs(named, runs), " ".join(named)), overrides, trust)
    entries = [entry for entry in find_runs(named, runs) if not entry.removed]
    statuses = run_statuses([entry.folder for entry in entries])
    retried = [entry for entry in entries if statuses[entry.folder.path].state in RETRIED]
    others = [statuses[entry.folder.path] for entry in entries if entry not in retried]
    unknown = [entry for entry in entries if statuses[entry.folder.path].state in ("unknown", "unreadable")]
    for entry in unknown:
        status = statuses[entry.folder.path]
        why = ", since it may be queued or running" if status.state == "unknown" else ""
        print(f"{entry.label}: not retried{why}: {status.reason}", file=sys.stderr)
    if others:
        does = "continues it" if entries[0].point is None else "starts and continues those"
        hint = f" {entries[0].start_command} {does}."
        waiting = any(status.state in ("preempted", "new") for status in others)
        print(f"Left alone: {count_states([status.shown for status in others])}.{hint if waiting else ''}")
    if not retried:
        print("As far as we know, no run has failed." if unknown else "No run failed or was lost.")
    labels = {entry.folder.path.absolute(): entry.label for entry in retried}
    submissions = _restart(labels, trust)
    code = worst_exit_code(submissions) or (UserError.exit_code if unknown else 0)
    if options.json:
        records = outcome_records(submissions, [labels[each.plan.folder.path] for each in submissions])
        left = [(entry.label, statuses[entry.folder.path]) for entry in entries if entry not in retried]
        skipped = [{"label": label, "state": status.state, "reason": status.reason} for label, status in left]
        answer({"exit_code": code, "runs": records, "skipped": skipped})
    return code


def _is_override(word: str) -> bool:
    key, equals, _ = word.lstrip("+~").partition("=")
    return bool(equals) and "/" not in key and not Path(word).exists()


def _continue_with(entry: RunEntry, overrides: Sequence[str], trust: bool) -> int:
    """Start a new run that has another run's configuration, with other values, and its whole state."""
    from titan_exp.cli.train import run as train

    if not trust:
        require_plain(entry.folder.config)
    path = str(entry.folder.path.absolute())
    # The user's come last, so that checkpoint.continue_from=null takes the weights alone.
    return train(["--config-path", path, *BEGINNING, f"checkpoint.continue_from={path}", *overrides])


def _restart(labels: Mapping[Path, str], trust: bool) -> list[Submission]:
    by_kind: dict[str, list[RunPlan]] = {}
    for path in labels:
        plan = plan_relaunch(RunFolder(path), trust)
        by_kind.setdefault(plan.experiment.cluster.kind, []).append(plan)
    console, submissions = RunConsole(), list[Submission]()
    executors = sorted(map(executor_for, by_kind), key=lambda executor: executor.waits)
    for executor in executors:
        executor.require(by_kind[executor.kind])
    by_kind = {kind: gate_runs(plans, console.echo) for kind, plans in by_kind.items()}
    options = SubmitOptions(echo=console.echo, title=lambda plan: labels[plan.folder.path])
    for executor in executors:
        results = executor.submit(by_kind[executor.kind], options)
        submissions += results
        for line in request_lines([each.plan for each in results if each.outcome == "submitted"]):
            console.echo(line)
        for submission in results if not executor.waits else ():
            job = f", job {submission.job_id}" if submission.job_id else ""
            text = (submission.reason or "").replace("\n", "\n  ")
            reason = f": {text}" if text else ""
            console.echo(f"{options.title(submission.plan)}: {submission.shown}{job}{reason}")
    return submissions
