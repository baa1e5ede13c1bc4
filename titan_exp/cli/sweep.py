"""What is typed after `titan-exp sweep`, and flags of `titan-exp train -m`, sorted for Hydra and its sweeper."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_exp.config.command_line.flags import take_flags
from titan_exp.config.command_line.hydra_args import SWITCHES, VALUED, read_arguments
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.study import Study
from titan_exp.launch.sweep.options import SweepOptions

HELP = """\
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

FLAGS = ("--dry-run", "--prune", "--yes", "--skip")
"""Flags of a sweep that stand alone."""


@dataclass(frozen=True)
class SweepWords:
    """What Hydra is to be told, and what the sweeper."""

    words: list[str]
    """Flags and overrides for Hydra."""
    asked: SweepOptions
    """The rest, for the sweeper."""
    inside: tuple[str, ...] = ()
    """Overrides that Hydra does not see at once: the study's, and those that were typed after its name."""
    where: str = ""
    """The study's file, for messages."""


def sweep_words(typed: Sequence[str]) -> SweepWords | None:
    """Sort what was typed after `titan-exp sweep`; None where the words asked for help or the list of studies.

    Raises:
        UserError: there is no such study, or it cannot be read, or a flag is unknown.
    """
    if {"--help", "-h"} & set(typed):
        print(HELP, end="")
        return None
    flags, rest = take_flags(typed, FLAGS[:-1], {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="sweep")
    arguments = read_arguments(rest)
    names = [word for word in arguments.overrides if "=" not in word and not word.startswith(("~", "+"))]
    from titan_exp.config.study.study_file import find_study, read_study

    if not names:
        if rest or flags:
            raise UserError(f"Which study? titan-exp sweep NAME {' '.join(typed)}\n  titan-exp sweep lists them.")
        _list_studies()
        return None
    study = read_study(find_study(names[0]))
    overrides = [word for word in arguments.overrides if word != names[0]]
    size = [word.removeprefix("size=") for word in overrides if word.startswith("size=")]
    hydras = [word for word in overrides if word.startswith("hydra")]
    others = tuple(word for word in overrides if word not in hydras and not word.startswith("size="))
    asked = replace(_asked(flags), study=study.path, size=size[-1] if size else None, typed=others)
    flags_for_hydra = [word for word in arguments.flags if word not in ("-m", "--multirun")]
    inside = (*_overrides_in(study), *others)
    return SweepWords(["-m", *flags_for_hydra, *hydras], asked, inside, str(study.path))


def train_words(typed: Sequence[str]) -> SweepWords:
    """Sort what was typed after `titan-exp train`, which may have a sweep's own flags.

    Raises:
        UserError: they were given without -m.
    """
    ours = (*FLAGS, "--jobs")
    if not any(word.partition("=")[0] in ours for word in typed):
        return SweepWords(list(typed), SweepOptions())
    flags, rest = take_flags(typed, FLAGS, {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="train")
    if "-m" not in rest and "--multirun" not in rest:
        raise UserError(f"{next(iter(flags))} is about a sweep: it goes with -m, or with titan-exp sweep.")
    return SweepWords(rest, _asked(flags))


def _asked(flags: Mapping[str, str | int | bool]) -> SweepOptions:
    if flags.get("--jobs") == 0:
        raise UserError("--jobs 0: nothing would ever run. The least is --jobs 1.")
    return SweepOptions(
        dry_run="--dry-run" in flags,
        skip="--skip" in flags,
        jobs=int(flags.get("--jobs", 1)),
        prune="--prune" in flags,
        yes="--yes" in flags,
    )


def _overrides_in(study: Study) -> list[str]:
    """Every override of a study, one for each key, values that differ listed with commas."""
    by_key: dict[str, dict[str, None]] = {}
    for text in (
        *study.held_fixed,
        *(text for size in study.sizes.values() for text in size),
        *(text for axis in study.axes for choice in axis.choices for text in choice.overrides),
    ):
        key, equals, value = text.partition("=")
        by_key.setdefault(key + equals, {})[value] = None
    return [f"{key}{','.join(values)}" for key, values in by_key.items()]


def _list_studies() -> None:
    from titan_exp.config.study.study_file import read_study, study_files

    files = study_files()
    print("titan-exp sweep NAME [--dry-run]\n")
    for name, path in files.items():
        try:
            said = read_study(path).question
        except UserError as error:
            said = str(error).partition("\n")[0]
        print(f"  {name}" + ("" if path.is_absolute() else f"  ({path})"))
        print(textwrap.fill(said, 110, initial_indent="      ", subsequent_indent="      "))
    if not any(not path.is_absolute() for path in files.values()):
        print(f"\nYour own go into {Path('sweeps')}/ in the folder where you type the command.")
