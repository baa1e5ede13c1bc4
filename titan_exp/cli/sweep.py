"""Run a study: every point of sweeps/NAME.yaml that is not done yet."""

import textwrap
from collections.abc import Sequence

from titan_exp.cli.hydra_command import run_sweep_with_hydra
from titan_exp.config.command_line.output import answer
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study_file import read_study, study_files
from titan_exp.launch.sweep.sweep_args import sweep_args

HELP_TEXT = """\
titan-exp sweep: run every point of a study, sweeps/NAME.yaml, that is not done yet.

  titan-exp sweep                              list the studies and their questions
  titan-exp sweep NAME --dry-run               every point: run, resources, state, reason if skipped; job scripts
  titan-exp sweep NAME [overrides] [flags]     run it (NAME may be a path)

An override holds for every point. One of a key that the study varies narrows the study (optimizer.lr=1e-3, or the names
of a list: balance=none,bias). One that lists values adds an axis (experiment.seed=0,1). size=NAME chooses one of the
sizes of the study, and cluster=slurm submits it.

Flags
  --dry-run      print the plan and start no run
  --jobs N       run N at a time on this machine, on the CPU (1), each with its share of the cores
  --prune        cancel waiting and running runs that are no longer points of the study
  --yes          do not ask for confirmation
  --json         print one JSON document, and all text for people on standard error
  --change-question   go on with a registered question that was changed after a look, without an error rate
  --config-dir FOLDER   find groups and options of your own in a folder

The same command again starts only what is missing, stopped or failed. Then:
  titan-exp status NAME      logs NAME      cancel NAME      retry NAME
"""


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    args = sweep_args(argv)
    if args is None:
        _list_studies("--json" in argv)
        return 0
    return run_sweep_with_hydra(args, lambda *_: 0)


def _list_studies(as_json: bool) -> None:
    files, texts = study_files(), dict[str, str]()
    for name, path in files.items():
        try:
            texts[name] = read_study(path).question
        except UserError as error:
            texts[name] = str(error).partition("\n")[0]
    if as_json:
        answer([{"name": name, "path": str(files[name]), "question": text} for name, text in texts.items()])
        return
    print("titan-exp sweep NAME [--dry-run]\n")
    for name, path in files.items():
        print(f"  {name}" + ("" if path.is_absolute() else f"  ({path})"))
        print(textwrap.fill(texts[name], 110, initial_indent="      ", subsequent_indent="      "))
    if not any(not path.is_absolute() for path in files.values()):
        print("\nPut studies of your own into the folder sweeps/ where you type the command.")
