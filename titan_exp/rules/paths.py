"""Rules about names and places on disk."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import Experiment


def name_is_a_folder_name(experiment: Experiment) -> Iterator[Violation]:
    """The experiment's name is safe as a folder's name everywhere."""
    name = experiment.experiment.name
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or len(name) > 128:
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".-")[:128] or "my_idea"
        yield Violation(
            "experiment.name",
            name,
            "it names a folder: letters, digits, `.`, `_` and `-`, beginning with a letter, digit or `_`, at most 128",
            f"experiment.name={cleaned}",
        )


def runs_can_be_written(experiment: Experiment) -> Iterator[Violation]:
    """The folder of runs exists or can be made."""
    asked = experiment.paths.runs
    place = Path(asked).expanduser().absolute()
    nearest = next(folder for folder in (place, *place.parents) if folder.exists())
    if not asked:
        yield Violation("paths.runs", "''", "it is empty", "paths.runs=runs")
    elif not nearest.is_dir():
        yield Violation("paths.runs", asked, f"{nearest} is a file", "name a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Violation("paths.runs", asked, f"{nearest} cannot be written to", "name a folder of your own")


RULES = (name_is_a_folder_name, runs_can_be_written)
