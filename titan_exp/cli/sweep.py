"""Run a study: every point of sweeps/NAME.yaml that is not done yet."""

import textwrap
from collections.abc import Sequence

from titan_exp.cli.shell.hydra_command import run_sweep_with_hydra
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study_file import read_study, study_files
from titan_exp.launch.sweep.sweep_args import sweep_args

HELP_TEXT = """\
titan-exp sweep: run every point of a study, sweeps/NAME.yaml, that is not done yet.

  titan-exp sweep                              list the studies and their questions
  titan-exp sweep NAME --dry-run               every point: run, resources, state, reason if skipped
  titan-exp sweep NAME [overrides] [flags]     run it; NAME is also a path

Overrides hold for every point. An override of an axis narrows it (optimizer.lr=1e-3, or the names of a list:
balance=none,bias); one that lists values is a further axis (experiment.seed=0,1). size=NAME chooses one of the study's
sizes, cluster=slurm submits.

Flags
  --dry-run      print the plan and start no run
  --jobs N       N runs at a time on this machine, on CPU (1); each gets its share of the cores
  --prune        cancel waiting and running runs that are no longer points of the study
  --yes          do not ask for confirmation
  --config-dir FOLDER   find groups and options of your own in a folder

Launched again, it starts only what is missing, stopped or failed. Then:
  titan-exp status NAME      logs NAME      cancel NAME      retry NAME
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    args = sweep_args(argv)
    if args is None:
        _list_studies()
        return 0
    return run_sweep_with_hydra(args, lambda *_: 0)


def _list_studies() -> None:
    files = study_files()
    print("titan-exp sweep NAME [--dry-run]\n")
    for name, path in files.items():
        try:
            text = read_study(path).question
        except UserError as error:
            text = str(error).partition("\n")[0]
        print(f"  {name}" + ("" if path.is_absolute() else f"  ({path})"))
        print(textwrap.fill(text, 110, initial_indent="      ", subsequent_indent="      "))
    if not any(not path.is_absolute() for path in files.values()):
        print("\nYour own studies are found in sweeps/ of the current folder.")
