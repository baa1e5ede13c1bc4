"""Study record: question, points, baseline and metrics, read from a study's `study.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.state import read_json

STUDY_FILE = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """Study as recorded at launch. Runs started by hand have none."""

    name: str
    """Name of the study: `experiment.name` of its runs."""
    question: str = ""
    points: Mapping[str, str] = field(default_factory=dict)
    """Varied values of each point, without the seed, by run id."""
    baseline: str | None = None
    """Baseline point, as in `points`."""
    metrics: tuple[tuple[str, str], ...] = ()
    """Metric names with their better direction, `min` or `max`."""
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that a named list of the study sets together, by its name."""
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name of the chosen value by named list, by run id."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Skip reasons, by point label."""


def read_study_record(folder: Path) -> StudyRecord | None:
    """Read the study record of a folder of runs; None if missing. Raises UserError if it is not a study record."""
    path = folder / STUDY_FILE
    found = read_json(path)
    if found is None:
        return None
    try:
        return StudyRecord(
            name=found.get("name") or folder.name,
            question=found.get("question", ""),
            points={point["run_id"]: point["variant"] for point in found.get("points", ())},
            baseline=found.get("baseline"),
            metrics=tuple(found.get("metrics", {}).items()),
            lists={name: tuple(keys) for name, keys in found.get("lists", {}).items()},
            choices={point["run_id"]: point.get("choices", {}) for point in found.get("points", ())},
            skipped=found.get("skipped", {}),
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a study record ({error!r}). Launch the study again to rewrite it.") from None
