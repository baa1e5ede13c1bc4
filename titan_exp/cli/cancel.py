"""Make runs save and stop, and start no further runs of a study."""

from collections.abc import Sequence

from titan_exp.config.command_line.options import take_flags
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.state.run_lookup import find_runs, find_study_folder, split_runs_folder
from titan_exp.launch.state.run_status import count_states, run_statuses
from titan_exp.launch.sweep.shipped_study import cancel_runs

HELP_TEXT = """\
titan-exp cancel: make runs save and stop, and remove waiting ones from the queue.

  titan-exp cancel NAME        all waiting and running runs of a study; a local sweep starts no further runs
  titan-exp cancel RUN ...     runs, by path, id prefix or STUDY/LABEL

Nothing is deleted: the command that started them continues them.
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    _, rest = take_flags(argv, (), verb="cancel")
    runs, named = split_runs_folder(rest)
    if not named:
        raise UserError("No run is named: titan-exp cancel NAME or RUN; titan-exp status lists runs.")
    entries = find_runs(named, runs)
    stopped = 0
    for word in named:
        study = find_study_folder(word, runs)
        if study is not None and (holder := study.holder()) is not None:
            study.request_stop("titan-exp cancel")
            stopped += 1
            print(f"{study.path.name}: no further run is started ({holder})")
    statuses = run_statuses([entry.folder for entry in entries])
    active = [entry for entry in entries if statuses[entry.folder.path].active]
    cancel_runs([entry.folder for entry in active], {entry.folder.path.name: entry.label for entry in active}, print)
    if not active and not stopped:
        print(f"No run is queued or running: {count_states([statuses[entry.folder.path].state for entry in entries])}.")
    return UserError.exit_code if any(statuses[entry.folder.path].state == "unknown" for entry in active) else 0
