"""The verb `titan-exp retry`: runs that failed or were lost are started again, in the same folder."""

from titan_exp.config.command_line.flags import take_flags
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import Executor, executor_for
from titan_exp.launch.local.executor import LocalExecutor
from titan_exp.launch.local.relaunch import plan_relaunch
from titan_exp.launch.memory_gate import gate_runs
from titan_exp.launch.run_console import RunConsole
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.state.run_lookup import RunEntry, find, split_runs_folder
from titan_exp.launch.state.run_status import run_statuses

HELP = """\
titan-exp retry: start runs again that failed or were lost, each in its folder and from its last checkpoint.

  titan-exp retry NAME         those of a study
  titan-exp retry RUN ...      runs, by path, by the beginning of their id, or by STUDY/LABEL

They run as their folders say, with the code as it is now. Runs that were stopped are not failed: the command that
started them continues them.
"""
AGAIN = ("failed", "lost")


def retry_command(words: list[str]) -> int:
    """Run the verb. Returns the exit code.

    Raises:
        UserError: a word names nothing, or there is none, or a run cannot be started again.
    """
    if {"--help", "-h"} & set(words):
        print(HELP, end="")
        return 0
    _, rest = take_flags(words, (), verb="retry")
    runs, named = split_runs_folder(rest)
    if not named:
        raise UserError("Retry what? titan-exp retry NAME or RUN; titan-exp status shows what failed.")
    found = [one for one in find(named, runs) if not one.removed]
    now = run_statuses([one.folder for one in found])
    again = [one for one in found if now[one.folder.path].state in AGAIN]
    others = [now[one.folder.path].state for one in found if one not in again]
    if others:
        said = ", ".join(f"{others.count(state)} {state}" for state in dict.fromkeys(others))
        print(f"Left alone: {said}." + (_how_to_go_on(found) if "preempted" in others or "new" in others else ""))
    if not again:
        print("Nothing failed or was lost.")
        return 0
    return _start(again)


def _start(again: list[RunEntry]) -> int:
    labels = {one.folder.path.absolute(): one.label for one in again}
    by_kind: dict[str, list[RunPlan]] = {}
    for one in again:
        plan = plan_relaunch(one.folder)
        by_kind.setdefault(plan.experiment.cluster.kind, []).append(plan)
    console, code = RunConsole(), 0
    by_kind = {kind: gate_runs(plans, console.say) for kind, plans in by_kind.items()}
    for kind, plans in sorted(by_kind.items(), key=lambda pair: pair[0] == "local"):
        if kind == "local":
            local = LocalExecutor(title=lambda plan: labels[plan.folder.path])
            local.submit(plans, say=console.say)
            code = local.worst or code
            continue
        backend: Executor = executor_for(kind)
        for one in backend.submit(plans, say=console.say):
            number = f", job {one.job_id}" if one.job_id else ""
            console.say(
                f"{labels[one.plan.folder.path]}: {one.outcome}{number}{f': {one.reason}' if one.reason else ''}"
            )
            code = 1 if one.outcome in ("refused", "failed") else code
    return code


def _how_to_go_on(found: list[RunEntry]) -> str:
    one = next(one for one in found)
    if one.point is not None:
        return f" titan-exp sweep {one.group} starts and continues those."
    return f" titan-exp train --config-path {one.folder.path} continues it."
