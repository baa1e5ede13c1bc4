"""Study folder `runs/NAME`: the study file as launched, and the runs of its points.

Holds `study.yaml` and `study.json`, with earlier versions in `history/`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from titan_exp.config.paths.foreign_file import read_text
from titan_exp.tracking.run_folder.attempts import read_json
from titan_exp.tracking.run_folder.files import FileLock, LockHolder, is_held, write_atomically
from titan_exp.tracking.run_folder.run_folder import RunFolder


class RoundsRecord(TypedDict, total=False):
    """Metric and better direction of later rounds and, with halving, rungs and the kept fraction."""

    metric: str
    better: str
    rungs: list[Any]
    keep: Any


@dataclass(frozen=True)
class StudyRun:
    """Study point and its run. Several points may share a run."""

    label: str
    """Varied values, including the seed."""
    variant: str
    """Varied values without the seed; runs of one variant are repetitions."""
    seed: int | None
    """Seed, if the study sets one."""
    run_id: str
    """Run id and folder name."""
    experiment_id: str
    processes: int
    steps: int
    kind: str
    overrides: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)
    """Name of the chosen value by named list."""
    round: int = 1
    """Rung of successive halving, or batch of Optuna, from 1."""


@dataclass(frozen=True)
class StudyRecord:
    """Content of study.json."""

    name: str
    question: str
    size: str
    """Chosen size; empty if the study has none."""
    typed: tuple[str, ...]
    baseline: str | None
    """Baseline variant of the comparison."""
    metrics: Mapping[str, str]
    """Better direction, `min` or `max`, by compared metric."""
    points: tuple[StudyRun, ...]
    """Points that can run, in study order."""
    skipped: Mapping[str, str]
    """Skip reasons of all other points, by label."""
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that a named list sets together, by its name."""
    rounds: RoundsRecord = field(default_factory=RoundsRecord)
    """Metric, better direction and, with halving, rungs and kept fraction; empty if all points start together."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind and bounds of each range of a search, by key."""
    tune: str = ""
    """Key over which each group of the comparison is tuned."""
    removed: tuple[StudyRun, ...] = ()
    """Points of earlier versions that the study no longer contains."""
    time: float = 0.0
    """Unix time of writing."""


class StudyFolder:
    """Folder of a study and its runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.yaml = path / "study.yaml"
        """Study file at the last launch."""
        self.json = path / "study.json"
        self.history = path / "history"
        """Earlier versions of study.yaml and study.json."""
        self.stop = path / "stop"
        """Stop flag: no further run is started."""
        self.lock = path / ".lock"
        """Lock of the process that runs the study on its machine."""

    def run(self, point: StudyRun) -> RunFolder:
        """Run folder of a point; may not exist yet."""
        return RunFolder(self.path / point.run_id)

    def read(self) -> StudyRecord | None:
        """Read study.json; None if missing. Raises UserError if it is not a study record."""
        return read_json(self.json, StudyRecord)

    def write(self, record: StudyRecord, text: str) -> StudyRecord:
        """Write study.yaml and study.json, archiving earlier versions; returns the record with its removed points.

        `text` is the study file. Each file is replaced atomically.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.read()
        now = replace(record, removed=removed_runs(before, record), time=time.time())
        if before is not None:
            same = self.yaml.exists() and read_text(self.yaml) == text
            if same and replace(before, time=now.time) == now:
                return before
            # A later round adds points, which is no other version.
            if not same or now.points[: len(before.points)] != before.points:
                self._archive()
        write_atomically(self.yaml, text)
        write_atomically(self.json, json.dumps(asdict(now), indent=1) + "\n")
        return now

    def holder(self) -> LockHolder | None:
        """Process that currently runs the study; None without one."""
        return FileLock(self.lock).holder() if is_held(self.lock) else None

    def request_stop(self, reason: str) -> None:
        """Set the stop flag."""
        write_atomically(self.stop, reason + "\n")

    def _archive(self) -> None:
        self.history.mkdir(exist_ok=True)
        number = len(list(self.history.glob("*.json"))) + 1
        for path in (self.yaml, self.json):
            if path.exists():
                write_atomically(self.history / f"{number:03d}{path.suffix}", read_text(path))


def removed_runs(before: StudyRecord | None, now: StudyRecord) -> tuple[StudyRun, ...]:
    """Runs of earlier versions that the study no longer contains, without duplicates."""
    kept = {point.run_id for point in now.points}
    earlier = {} if before is None else {point.run_id: point for point in (*before.removed, *before.points)}
    return tuple(point for run_id, point in earlier.items() if run_id not in kept)
