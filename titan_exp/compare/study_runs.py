"""Study record: question, points, baseline and metrics, read from a study's `study.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

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
    seeds: Mapping[str, int | None] = field(default_factory=dict)
    """Seed of each point, by run id."""
    rounds: Mapping[str, Any] = field(default_factory=dict)
    """Metric and better direction that later rounds follow, with rungs and kept fraction of successive halving."""
    rounds_of: Mapping[str, int] = field(default_factory=dict)
    """Rung or batch, from 1, by run id."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind and bounds of each range of a search, by key."""
    tune: str = ""
    """Key over which each group is tuned."""

    @property
    def rungs(self) -> Sequence[str]:
        """Rungs of successive halving; empty without."""
        return self.rounds.get("rungs", ())

    @property
    def is_adaptive(self) -> bool:
        """True for a search and for successive halving."""
        return bool(self.rounds or self.parameters)


def read_study_record(folder: Path) -> StudyRecord | None:
    """Read the study record of a folder of runs; None if missing. Raises UserError if it is not a study record."""
    found = read_json(folder / STUDY_FILE, _Study)
    if found is None:
        return None
    points = found.get("points", [])
    return StudyRecord(
        name=found.get("name") or folder.name,
        question=found.get("question", ""),
        points={point["run_id"]: point["variant"] for point in points},
        baseline=found.get("baseline"),
        metrics=tuple(found.get("metrics", {}).items()),
        lists={name: tuple(keys) for name, keys in found.get("lists", {}).items()},
        choices={point["run_id"]: point.get("choices", {}) for point in points},
        skipped=found.get("skipped", {}),
        seeds={point["run_id"]: point.get("seed") for point in points},
        rounds=found.get("rounds", {}),
        rounds_of={point["run_id"]: point.get("round", 1) for point in points},
        parameters=found.get("parameters", {}),
        tune=found.get("tune", ""),
    )


class _Point(TypedDict):
    run_id: str
    variant: str
    choices: NotRequired[dict[str, str]]
    seed: NotRequired[int | None]
    round: NotRequired[int]


class _Rounds(TypedDict, total=False):
    metric: str
    better: str
    rungs: list[Any]


class _Study(TypedDict, total=False):
    name: str
    question: str
    points: list[_Point]
    baseline: str | None
    metrics: dict[str, str]
    lists: dict[str, list[str]]
    skipped: dict[str, str]
    rounds: _Rounds
    parameters: dict[str, dict[str, Any]]
    tune: str
