"""What is typed after `titan-exp sweep`, and the flags of `titan-exp train -m`, as Hydra's sweeper reads it."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.arguments import SWITCHES, VALUED
from titan_exp.config.errors import UserError
from titan_exp.config.flags import take_flags

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
    """What Hydra is to be told."""

    words: list[str]
    """Flags and overrides, those of the sweeper included."""
    inside: tuple[str, ...] = ()
    """Overrides that the study holds, to be looked at with those that were typed."""
    where: str = ""
    """The study's file, for messages."""


def sweep_words(typed: Sequence[str]) -> SweepWords | None:
    """What was typed after `titan-exp sweep`, for Hydra; None where the words asked for help or the list of studies.

    Raises:
        UserError: there is no such study, or it cannot be read, or a flag is unknown.
    """
    if {"--help", "-h"} & set(typed):
        print(HELP, end="")
        return None
    flags, rest = take_flags(typed, FLAGS[:-1], {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="sweep")
    names = [word for word in rest if "=" not in word and not word.startswith(("-", "~", "+"))]
    from titan_exp.config.study_file import find_study, read_study

    if not names:
        if rest or flags:
            raise UserError(f"Which study? titan-exp sweep NAME {' '.join(typed)}\n  titan-exp sweep lists them.")
        _list_studies()
        return None
    rest.remove(names[0])
    study = read_study(find_study(names[0]))
    sizes = [word for word in rest if word.startswith("size=")]
    sweeper = {"study": _quoted(str(study.path.absolute())), **_wishes(flags)}
    if sizes:
        sweeper["size"] = _quoted(sizes[-1].removeprefix("size="))
    rest = [word for word in rest if word not in (*sizes, "-m", "--multirun")]
    by_key: dict[str, dict[str, None]] = {}
    for text in (
        *study.held_fixed,
        *(text for size in study.sizes.values() for text in size),
        *(text for axis in study.axes for choice in axis.choices for text in choice.overrides),
    ):
        key, equals, value = text.partition("=")
        by_key.setdefault(key + equals, {})[value] = None
    inside = tuple(f"{key}{','.join(values)}" for key, values in by_key.items())
    return SweepWords(["-m", *rest, *_for_sweeper(sweeper)], inside, str(study.path))


def train_words(typed: Sequence[str]) -> list[str]:
    """What was typed after `titan-exp train`, with a sweep's own flags turned into keys of the sweeper.

    Raises:
        UserError: they were given without -m.
    """
    ours = (*FLAGS, "--jobs")
    if not any(word.partition("=")[0] in ours for word in typed):
        return list(typed)
    flags, rest = take_flags(typed, FLAGS, {"--jobs": int}, others=(*SWITCHES, *VALUED), verb="train")
    if "-m" not in rest and "--multirun" not in rest:
        raise UserError(f"{next(iter(flags))} is about a sweep: it goes with -m, or with titan-exp sweep.")
    return [*rest, *_for_sweeper(_wishes(flags))]


def _wishes(flags: dict[str, str | int | bool]) -> dict[str, str]:
    if flags.get("--jobs") == 0:
        raise UserError("--jobs 0: nothing would ever run. The least is --jobs 1.")
    return {name.lstrip("-").replace("-", "_"): str(value).lower() for name, value in flags.items()}


def _for_sweeper(keys: dict[str, str]) -> list[str]:
    return [f"hydra.sweeper.{key}={value}" for key, value in keys.items()]


def _list_studies() -> None:
    from titan_exp.config.study_file import read_study, study_files

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


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
