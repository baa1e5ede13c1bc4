"""Make runs save and stop, and start no further runs of a study."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.verb_options import CancelOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.state.run_lookup import find_runs, find_study_folder, named_runs, runs_folder
from titan_exp.launch.state.run_status import count_states, run_statuses
from titan_exp.launch.sweep.shipped_study import cancel_runs

USAGE = """\
titan-exp cancel: make runs save and stop, and remove waiting ones from the queue.

  titan-exp cancel NAME        all waiting and running runs of a study; a local sweep starts no further runs
  titan-exp cancel RUN ...     runs, by path, id prefix, STUDY/LABEL or URL

Nothing is deleted: the command that started them continues them."""
HELP_TEXT = options_help(USAGE, CancelOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(CancelOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if not named:
        raise UserError("No run is named: titan-exp cancel NAME or RUN; titan-exp status lists runs.")
    entries = find_runs(named, runs)
    stopped, denied = 0, 0
    for word in named:
        study = find_study_folder(word, runs)
        if study is not None and (holder := study.holder()) is not None:
            if not _is_writable(study.path, study.path.name):
                denied += 1
                continue
            study.request_stop("titan-exp cancel")
            stopped += 1
            print(f"{study.path.name}: no further run is started ({holder})")
    statuses = run_statuses([entry.folder for entry in entries])
    active = [entry for entry in entries if statuses[entry.folder.path].active]
    own = [entry for entry in active if _is_writable(entry.folder.path, entry.label)]
    denied += len(active) - len(own)
    labels = {entry.folder.path.name: entry.label for entry in own}
    complete = cancel_runs([entry.folder for entry in own], labels, print)
    if not active and not stopped and not denied:
        print(f"No run is queued or running: {count_states([statuses[entry.folder.path].shown for entry in entries])}.")
    unknown = any(statuses[entry.folder.path].state == "unknown" for entry in own)
    return UserError.exit_code if unknown or denied or not complete else 0


def _is_writable(folder: Path, label: str) -> bool:
    """True if a stop request can be written; else a message of another user's folder."""
    writable = os.access(folder, os.W_OK)
    if not writable:
        print(f"{label}: not cancelled, as you may not write to {folder}; ask its user", file=sys.stderr)
    return writable
