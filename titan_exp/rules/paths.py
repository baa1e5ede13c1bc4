"""Path rules: name and folder of a run."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.run import PathsConfig, RunConfig
from titan_exp.rules.rule import rules


def name_is_a_folder_name(run: RunConfig) -> Iterator[Violation]:
    """The experiment's name is a portable folder name."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", run.name) or len(run.name) > 128:
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", run.name).lstrip(".-")[:128] or "my_idea"
        reason = (
            "it names a folder: letters, digits, `.`, `_` and `-`, beginning with a letter, digit or `_`, at most 128"
        )
        yield Violation("experiment.name", run.name, reason, f"experiment.name={cleaned}")


def runs_folder_is_a_folder(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs is a folder or does not exist."""
    nearest = _nearest(paths)
    if not paths.runs:
        yield Violation("paths.runs", "''", "it is empty", "paths.runs=runs")
    elif not nearest.is_dir():
        yield Violation("paths.runs", paths.runs, f"{nearest} is a file", "the path of a folder")


def runs_folder_is_writable(paths: PathsConfig) -> Iterator[Violation]:
    """The folder of runs can be created or written to."""
    nearest = _nearest(paths)
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        yield Violation("paths.runs", paths.runs, f"{nearest} cannot be written to", "a folder that you may write to")


def _nearest(paths: PathsConfig) -> Path:
    folder = Path(paths.runs).expanduser().absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


PATH_RULES = rules(name_is_a_folder_name, runs_folder_is_a_folder)
PATH_LAUNCH_RULES = rules(runs_folder_is_writable)
