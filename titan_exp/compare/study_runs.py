"""Study record: question, points, baseline and metrics, read from a study's `study.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.state import read_json

STUDY_FILE = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """A study as recorded at its launch. Runs that were started by hand have none."""

    name: str
    """Name of the study: `experiment.name` of its runs."""
    question: str = ""
    points: Mapping[str, str] = field(default_factory=dict)
    """Varied values of every point, without the seed, by run id."""
    baseline: str | None = None
    """Baseline point, as in `points`."""
    metrics: tuple[tuple[str, str | None], ...] = ()
    """Names of metrics with their better direction, `min`, `max` or None."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reasons of points that cannot run, by label."""


def read_study_record(folder: Path) -> StudyRecord | None:
    """Read the study record of a folder of runs; None where there is none.

    Raises:
        UserError: the file holds something else.
    """
    path = folder / STUDY_FILE
    found = read_json(path)
    if found is None:
        return None
    try:
        return StudyRecord(
            name=str(found.get("name") or folder.name),
            question=str(found.get("question") or ""),
            points={str(point["run_id"]): _label(point) for point in found.get("points") or []},
            baseline=_baseline(found.get("baseline")),
            metrics=_metrics(found.get("metrics") or []),
            skipped={str(label): str(reason) for label, reason in (found.get("skipped") or {}).items()},
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a study record ({error!r}). Launch the study again to rewrite it.") from None


def _label(point: Mapping[str, Any]) -> str:
    return str(point.get("variant") or point.get("label") or "")


def _baseline(found: Any) -> str | None:
    if isinstance(found, Mapping):
        return " ".join(f"{key}={value}" for key, value in found.items())
    return str(found) if found else None


def _metrics(found: Any) -> tuple[tuple[str, str | None], ...]:
    """Parse a mapping of names to directions, or a list of names or of objects with both."""
    if isinstance(found, Mapping):
        return tuple((str(name), better) for name, better in found.items())
    return tuple(
        (entry, None) if isinstance(entry, str) else (entry["name"], entry.get("direction")) for entry in found
    )
