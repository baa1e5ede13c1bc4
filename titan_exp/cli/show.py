"""Show one run: configuration, code, lineage, state, checkpoints, next commands."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import ShowOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import loaded
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.run_lookup import find_runs, named_runs, require_one, runs_folder

USAGE = """\
titan-exp show RUN: show one run, from its folder. It changes nothing, and imports no code that its configuration
names.

  titan-exp show RUN                   its state, attempts and checkpoints; what differs from the defaults, as a command
                                       that composes it; its code; its parents and children; commands to go on
  titan-exp show RUN --plot            also draws loss.png and, with experts, experts.png into it
  titan-exp show RUN paths.runs=FOLDER a run of another folder

RUN is a path, an id prefix, STUDY/LABEL or a URL. To compare two, type titan-exp diff A B."""
HELP_TEXT = options_help(USAGE, ShowOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(ShowOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if len(named) != 1:
        raise UserError("Name one run: titan-exp show RUN (titan-exp status lists runs).")
    entry = require_one(find_runs(named, runs), named[0])
    from titan_exp.launch.run_summary import summarize_run, summary_lines

    if not entry.folder.path.is_dir():
        raise UserError(f"{entry.label}: this run has not started yet. Start it with {entry.start_command}.")
    # Other verbs find NAME/ID in the default folder of runs.
    is_default = runs == runs_folder() and entry.folder.path.parent.parent == runs
    path = entry.folder.path
    summary = summarize_run(entry, "/".join(path.parts[-2:]) if is_default else str(path))
    if options.json:
        answer(asdict(summary))
    else:
        print("\n".join(summary_lines(summary)))
        with suppress(UserError):  # a configuration that this user does not trust, or of another version
            for report in loaded("unfinished"):
                for line in report(load_experiment(entry.folder.config), path):
                    print(line)
    if options.plot:
        from titan_exp.compare.output.plots import draw_run

        for line in draw_run(path):
            print(line, file=sys.stderr if options.json else sys.stdout)
    return 0
