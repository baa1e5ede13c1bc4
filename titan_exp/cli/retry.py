"""Restart failed and lost runs in their folders."""

from collections.abc import Sequence

from titan_exp.config.command_line.options import take_flags
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.retry import retry_runs
from titan_exp.launch.state.run_lookup import find_runs, split_runs_folder
from titan_exp.launch.state.run_status import count_states, run_statuses

HELP_TEXT = """\
titan-exp retry: restart failed and lost runs, each in its folder and from its last checkpoint.

  titan-exp retry NAME         those of a study
  titan-exp retry RUN ...      runs, by path, id prefix or STUDY/LABEL

Configuration is that of the folder, code is the current one. A stopped run has not failed: the command that started
it continues it.
"""
RETRIED = ("failed", "lost")
"""States that are retried."""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    _, rest = take_flags(argv, (), verb="retry")
    runs, named = split_runs_folder(rest)
    if not named:
        raise UserError("No run is named: titan-exp retry NAME or RUN; titan-exp status lists failed ones.")
    entries = [entry for entry in find_runs(named, runs) if not entry.removed]
    statuses = run_statuses([entry.folder for entry in entries])
    retried = [entry for entry in entries if statuses[entry.folder.path].state in RETRIED]
    others = [statuses[entry.folder.path].state for entry in entries if entry not in retried]
    if others:
        first = entries[0]
        hint = f" titan-exp train --config-path {first.folder.path} continues it."
        if first.point is not None:
            hint = f" titan-exp sweep {first.group} starts and continues those."
        print(f"Left alone: {count_states(others)}.{hint if {'preempted', 'new'} & set(others) else ''}")
    if not retried:
        print("No run failed or was lost.")
        return 0
    return retry_runs({entry.folder.path.absolute(): entry.label for entry in retried})
