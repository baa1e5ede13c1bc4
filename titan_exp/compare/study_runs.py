"""What a study says of itself: question, points, baseline and metrics, from `study.json` in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.state import read_json

STUDY_FILE = "study.json"
"""Beside the run folders of a study."""


@dataclass(frozen=True)
class StudyRecord:
    """A study, as far as comparing needs it. Runs that were started by hand have none."""

    name: str
    """Its name, which is `experiment.name` of its runs."""
    question: str = ""
    """What it is to answer."""
    points: Mapping[str, str] = field(default_factory=dict)
    """What varies at every point, the seed left out, by run id."""
    baseline: str | None = None
    """The point that the others are compared with, as in `points`."""
    metrics: tuple[tuple[str, str | None], ...] = ()
    """Names of metrics, each with the better direction, `min` or `max`, or None where it is not said."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why, by label, for points that cannot run."""


def read_study_record(folder: Path) -> StudyRecord | None:
    """The study in a folder of runs; None where the runs there belong to none.

    Raises:
        UserError: its file holds something else.
    """
    path = folder / STUDY_FILE
    found = read_json(path)
    if found is None:
        return None
    try:
        return StudyRecord(
            name=str(found.get("name") or folder.name),
            question=str(found.get("question") or ""),
            points={str(point["run_id"]): _varies(point) for point in found.get("points") or []},
            baseline=_baseline(found.get("baseline")),
            metrics=_metrics(found.get("metrics") or []),
            skipped={str(label): str(reason) for label, reason in (found.get("skipped") or {}).items()},
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} does not describe a study ({error!r}). Launch the study again; it writes it anew."
        ) from None


def _varies(point: Mapping[str, Any]) -> str:
    return str(point.get("variant") or point.get("label") or "")


def _baseline(found: Any) -> str | None:
    if isinstance(found, Mapping):
        return " ".join(f"{key}={value}" for key, value in found.items())
    return str(found) if found else None


def _metrics(found: Any) -> tuple[tuple[str, str | None], ...]:
    """A mapping of names to directions, or a list of names or of objects with both."""
    if isinstance(found, Mapping):
        return tuple((str(name), better) for name, better in found.items())
    return tuple(
        (entry, None) if isinstance(entry, str) else (entry["name"], entry.get("direction")) for entry in found
    )
