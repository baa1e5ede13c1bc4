"""Make runs save and stop, and start no further runs of a study."""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import CancelOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.executor import NOT_CANCELLED
from titan_exp.launch.run_lookup import find_runs, find_study_folder, named_runs, runs_folder
from titan_exp.launch.run_status import count_states, run_statuses, status_rows
from titan_exp.launch.sweep.shipped_study import cancel_runs

USAGE = """\
titan-exp cancel: make runs save and stop, and take waiting ones out of the queue.

  titan-exp cancel NAME        all waiting and running runs of a study (a local sweep starts no further ones)
  titan-exp cancel RUN ...     runs, by path, id prefix, STUDY/LABEL or URL

This deletes nothing. To continue the runs, type the command that started them."""
HELP_TEXT = options_help(USAGE, CancelOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(CancelOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if not named:
        raise UserError("Name a run or a study: titan-exp cancel NAME or RUN (titan-exp status lists them).")
    entries = find_runs(named, runs)
    stopped, denied = list[str](), 0
    for word in named:
        study = find_study_folder(word, runs)
        if study is not None and (holder := study.holder()) is not None:
            if not _is_writable(study.path, study.path.name):
                denied += 1
                continue
            study.request_stop("titan-exp cancel")
            stopped.append(study.path.name)
            print(f"{study.path.name}: the sweep starts no further run ({holder})")
    statuses = run_statuses([entry.folder for entry in entries])
    active = [entry for entry in entries if statuses[entry.folder.path].active]
    own = [entry for entry in active if _is_writable(entry.folder.path, entry.label)]
    denied += len(active) - len(own)
    labels = {entry.folder.path.name: entry.label for entry in own}
    results = cancel_runs([entry.folder for entry in own], labels, print)
    if not active and not stopped and not denied:
        print(f"No run is queued or running: {count_states([statuses[entry.folder.path].shown for entry in entries])}.")
    unknown = any(statuses[entry.folder.path].state == "unknown" for entry in own)
    left = any(NOT_CANCELLED in result for result in results.values())
    code = UserError.exit_code if unknown or denied or left else 0
    if options.json:
        rows = [asdict(row) | {"result": results.get(Path(row.folder))} for row in status_rows(entries)]
        answer({"exit_code": code, "stopped_sweeps": stopped, "runs": rows})
    return code


def _is_writable(folder: Path, label: str) -> bool:
    """True if a stop request can be written; otherwise prints a message about another user's folder."""
    writable = os.access(folder, os.W_OK)
    if not writable:
        print(f"{label}: not cancelled, since you may not write to {folder}, so ask its owner", file=sys.stderr)
    return writable
