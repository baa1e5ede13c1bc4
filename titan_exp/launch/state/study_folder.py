"""Study folder: the study file as launched, and its points with their runs.

`runs/NAME/study.yaml` and `study.json`; earlier versions of both lie in `history/`.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.tracking.run_folder.file_lock import FileLock, LockHolder, is_held
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import read_json


@dataclass(frozen=True)
class StudyRun:
    """A point of a study and its run. Points that compute the same share one."""

    label: str
    """Varied values, with the seed."""
    variant: str
    """Varied values without the seed: runs of one variant are repetitions."""
    seed: int | None
    """The seed, where the study gives seeds."""
    run_id: str
    """Name of the run, and of its folder in the study's."""
    experiment_id: str
    """Name of what it computes, in any layout."""
    processes: int
    """Ranks."""
    steps: int
    """Optimizer steps of the whole run."""
    kind: str
    """`cluster.kind`: who carries it out."""
    overrides: tuple[str, ...]
    """Everything that the point sets."""


@dataclass(frozen=True)
class StudyRecord:
    """The content of study.json."""

    name: str
    """Name of the study's file."""
    question: str
    """Question of the study."""
    size: str
    """The size that was chosen; empty where the study has none."""
    typed: tuple[str, ...]
    """Overrides that were typed."""
    baseline: str | None
    """The variant that the others are compared with."""
    metrics: Mapping[str, str]
    """Compared metrics, and the better end of each: `min` or `max`."""
    points: tuple[StudyRun, ...]
    """Every point that can run, in the order of the study."""
    skipped: Mapping[str, str]
    """Why, by label, for every other point."""
    removed: tuple[StudyRun, ...] = ()
    """Points of earlier versions that the study no longer holds; their runs are still there."""
    time: float = 0.0
    """Unix time at which this was written."""


class StudyFolder:
    """The folder at `path`, which holds a study's runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The folder."""
        self.yaml = path / "study.yaml"
        """The study's file as it was when the study was last launched."""
        self.json = path / "study.json"
        """Its points and their runs."""
        self.history = path / "history"
        """Earlier versions of both."""
        self.stop = path / "stop"
        """Flag: start no further run."""
        self.lock = path / ".lock"
        """Held by the process that runs the study's points on its machine."""

    def run(self, of: StudyRun) -> RunFolder:
        """The folder of a point's run, which need not be there yet."""
        return RunFolder(self.path / of.run_id)

    def read(self) -> StudyRecord | None:
        """Content of study.json; None if there is none.

        Raises:
            UserError: the file holds something else.
        """
        fields = read_json(self.json)
        if fields is None:
            return None
        try:
            return StudyRecord(
                **{
                    **fields,
                    "typed": tuple(fields["typed"]),
                    "points": tuple(map(_study_run, fields["points"])),
                    "removed": tuple(map(_study_run, fields["removed"])),
                }
            )
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{self.json} does not hold a study ({error}). Remove it; titan-exp sweep writes it anew."
            ) from None

    def write(self, record: StudyRecord, text: str) -> StudyRecord:
        """Replace both files, keeping the earlier ones where they differ; returns what was written.

        Args:
            record: the study now; what it no longer holds is found here.
            text: of the study's file.

        Raises:
            OSError: the disk is full or the folder cannot be written to; the earlier files are as they were.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.read()
        now = replace(record, removed=_removed(before, record), time=time.time())
        if before is not None:
            if _lasting(before) == _lasting(now) and self.yaml.exists() and self.yaml.read_text() == text:
                return before
            self._keep()
        write_atomically(self.yaml, text)
        write_atomically(self.json, json.dumps(asdict(now), indent=1) + "\n")
        return now

    def holder(self) -> LockHolder | None:
        """The process that runs the study's points now; None where none does."""
        return FileLock(self.lock).holder() if is_held(self.lock) else None

    def request_stop(self, reason: str) -> None:
        """Ask that process to start no further run."""
        write_atomically(self.stop, reason + "\n")

    def _keep(self) -> None:
        self.history.mkdir(exist_ok=True)
        number = len(list(self.history.glob("*.json"))) + 1
        for path in (self.yaml, self.json):
            if path.exists():
                write_atomically(self.history / f"{number:03d}{path.suffix}", path.read_text(encoding="utf-8"))


def _study_run(fields: Mapping[str, Any]) -> StudyRun:
    return StudyRun(**{**fields, "overrides": tuple(fields["overrides"])})


def _lasting(record: StudyRecord) -> dict[str, Any]:
    return {**asdict(record), "time": 0.0}


def _removed(before: StudyRecord | None, now: StudyRecord) -> tuple[StudyRun, ...]:
    """Runs that an earlier version held and this one does not, each once."""
    held = {point.run_id for point in now.points}
    earlier = {} if before is None else {point.run_id: point for point in (*before.removed, *before.points)}
    return tuple(point for run_id, point in earlier.items() if run_id not in held)
