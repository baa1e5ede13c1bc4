"""Show what differs between two runs: configuration, code, environment, data."""

from collections.abc import Sequence
from dataclasses import asdict

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.output import answer
from titan_exp.config.command_line.verb_options import DiffOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.run_lookup import find_runs, named_runs, require_one, runs_folder

USAGE = """\
titan-exp diff A B: show what differs between two runs, from their folders. It changes nothing, and imports no code
that their configurations name.

  titan-exp diff A B   configuration (values side by side), code (commits and files, your own repositories too),
                       versions of packages, and the identity and content of the training data

A and B are paths, id prefixes, STUDY/LABEL or URLs. To compare their metrics, type titan-exp compare A B."""
HELP_TEXT = options_help(USAGE, DiffOptions)


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(DiffOptions, argv)
    runs, named = runs_folder(options.runs), named_runs(rest)
    if len(named) != 2:
        raise UserError("Name two runs: titan-exp diff A B (titan-exp status lists runs).")
    entries = [require_one(find_runs([name], runs), name) for name in named]
    from titan_exp.launch.run_summary import diff_lines, diff_runs

    for entry in entries:
        if not entry.folder.path.is_dir():
            raise UserError(f"{entry.label}: this run has not started yet, so there is nothing to compare.")
    found = diff_runs(entries[0].run, entries[1].run)
    answer(asdict(found)) if options.json else print("\n".join(diff_lines(found)))
    return 0
