"""Run a study, every point of sweeps/NAME.yaml, or what is missing of it."""

import textwrap
from collections.abc import Sequence

from titan_exp.cli.hydra_command import run_sweep_with_hydra
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study_file import read_study, study_files
from titan_exp.launch.sweep.sweep_args import sweep_args

HELP_TEXT = """\
titan-exp sweep: run a study, sweeps/NAME.yaml, or what is missing of it.

  titan-exp sweep                              the studies there are, and what each asks
  titan-exp sweep NAME --dry-run               every point: its run, what it asks for, its state, what is skipped
  titan-exp sweep NAME [overrides] [flags]     run it; NAME is also a path

Overrides hold for every point. One of a key that the study varies narrows that axis (optimizer.lr=1e-3), one that lists
values is a further axis (experiment.seed=0,1). size=NAME chooses one of the study's sizes, cluster=slurm submits.

Flags
  --dry-run      print the plan, start nothing
  --jobs N       so many runs at a time on this machine, on CPU (1); each gets its share of the cores
  --prune        cancel runs that wait or run and that the study no longer holds
  --yes          ask nothing
  --config-dir FOLDER   find groups and options of your own in a folder

Launched again, it starts only what is missing, stopped or failed. Then:
  titan-exp status NAME      logs NAME      cancel NAME      retry NAME
"""


def run(words: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    args = sweep_args(words)
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
        print("\nYour own go into sweeps/ in the folder where you type the command.")
