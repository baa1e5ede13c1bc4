"""Runs to compare: their records, rows of equal experiments, and selection by folder, id, pattern or study name."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from titan_exp.compare.statistics import Delta, Estimate
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed
from titan_exp.config.schema.typed_config import read_values
from titan_exp.launch.worlds import summarize_worlds
from titan_exp.plan.prediction import PredictedMetrics, read_predicted_metrics
from titan_exp.tracking.number_format import format_items
from titan_exp.tracking.run_folder.attempts import read_json
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows
from titan_exp.tracking.run_folder.provenance_records import (
    Lineage,
    ancestors,
    read_code,
    read_environment_record,
    read_history,
    read_overrides,
)
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder, is_readable_run, readable_runs
from titan_exp.tracking.sinks.sink import Row as MetricRow

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


SILENCE = 120.0
"""Seconds without a heartbeat before a running run without a visible lock counts as lost."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not; unknown fields are None."""

    study: str
    """`experiment.name`, the parent folder's name, or the W&B group."""
    run_id: str
    experiment_id: str | None
    state: str
    """`pending`, `running`, `done`, `failed`, `preempted`, or `lost` (recorded as running, without lock or
    heartbeat)."""
    reason: str | None
    config: Mapping[str, Any]
    """Resolved configuration, nested."""
    rows: Sequence[MetricRow]
    world_size: int | None
    seconds: float | None
    """Wall-clock time of all attempts, without those of parents."""
    device_seconds: float | None
    """Wall-clock time times processes, over all attempts, without those of parents."""
    device: str | None
    """GPU or CPU name."""
    commit: str | None
    dirty: bool | None
    """True if the code differed from the commit."""
    overrides: tuple[str, ...]
    source: str
    """Folder or URL."""
    lost_seconds: float | None = None
    """Seconds lost to failures of worlds, over all attempts; None if the run has one."""
    predicted: PredictedMetrics = field(default_factory=PredictedMetrics)
    """Predictions made before the start."""
    lineage: Lineage | None = None
    """Parent and step of a continued run, whose `rows` begin with its parent's."""
    parent: "Run | None" = None
    """Parent of a continued run; None if it is not on this machine."""

    @property
    def seed(self) -> int | None:
        """Seed of initial weights and data order."""
        return self.config.get("experiment", {}).get("seed")

    @property
    def begins(self) -> int:
        """Tokens that its parents had trained on when a run was continued; 0 for other runs."""
        return 0 if self.lineage is None else self.lineage.tokens

    @property
    def tokens(self) -> int:
        """Tokens of the whole job at the last row; 0 without rows."""
        return int(next((tokens for row in reversed(self.rows) if (tokens := row.get("tokens"))), 0) or 0)

    @property
    def step(self) -> int:
        """Optimizer steps at the last row."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    def series(self, key: str, up_to: float = math.inf, *, above: float = -1.0) -> tuple[list[float], list[float]]:
        """Known values of a metric with their token counts, above `above` and up to `up_to` tokens."""
        if isinstance(self.rows, MetricRows):
            return self.rows.series(key, "tokens", above=above, up_to=up_to)
        known = [
            (float(tokens), float(value))
            for row in self.rows
            if (value := row.get(key)) is not None
            and (tokens := row.get("tokens")) is not None
            and above < tokens <= up_to
        ]
        return [tokens for tokens, _ in known], [value for _, value in known]


def read_run(path: str | Path) -> Run:
    """Read a run folder in any state. Raises UserError if it has no configuration or a damaged file."""
    folder = RunFolder(path)
    config = read_values(folder.config)
    code = read_code(folder.code)
    attempts = folder.read_attempts()
    rows = read_history(folder.path)
    ancestor = next(ancestors(folder.path), None)
    state, reason = _state(folder)
    alive = state in ("running", "lost")
    spans = [
        (attempt, _seconds(attempt, folder if alive and attempt is attempts[-1] else None)) for attempt in attempts
    ]
    known = [(attempt, seconds) for attempt, seconds in spans if seconds is not None]
    return Run(
        study=str((config.get("experiment") or {}).get("name") or folder.path.resolve().parent.name),
        run_id=(code and code.run_id) or folder.path.resolve().name,
        experiment_id=code and code.experiment_id,
        state=state,
        reason=reason,
        config=config,
        rows=rows,
        world_size=attempts[-1].world_size if attempts else None,
        seconds=sum(seconds for _, seconds in known) if known else None,
        device_seconds=sum(seconds * attempt.world_size for attempt, seconds in known) if known else None,
        device=_device(folder.env),
        commit=code and code.parts[0].commit,
        dirty=code and code.dirty,
        overrides=read_overrides(folder.overrides) or (),
        source=str(path),
        lost_seconds=None if (worlds := summarize_worlds(folder)) is None else worlds.lost,
        predicted=read_predicted_metrics(folder),
        lineage=None if ancestor is None else ancestor.lineage,
        parent=None if ancestor is None or ancestor.folder is None else _read_parent(ancestor.folder),
    )


def _read_parent(folder: Path) -> Run | None:
    with suppress(UserError):  # removed in part: its cost is unknown
        return read_run(folder)
    return None


def _state(folder: RunFolder) -> tuple[str, str | None]:
    state = folder.read_state()
    if state is None:
        return "pending", "never started"
    if state.state != "running" or folder.holder() is not None:
        return state.state, state.reason
    beat = folder.read_heartbeat()
    # Locks of another machine may be invisible here; heartbeats are not.
    if beat is not None and beat.age < SILENCE:
        return "running", None
    return "lost", "recorded as running, but its folder is not locked and its heartbeat has stopped"


def _seconds(attempt: Attempt, living: RunFolder | None) -> float | None:
    if attempt.start is None:
        return None
    if attempt.end is not None:
        return max(0.0, attempt.end - attempt.start)
    beat = living.read_heartbeat() if living else None
    return max(0.0, min(beat.time, time.time()) - attempt.start) if beat else None


def _device(path: Path) -> str | None:
    try:
        found = read_environment_record(path) or {}
    except UserError:
        return None
    gpus = [str(gpu.get("name")) for gpu in found.get("gpus") or []]
    return ", ".join(dict.fromkeys(gpus)) or found.get("cpu")


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str
    """Short names and values of the differing keys: `lr=0.003 tp=2`."""
    values: Mapping[str, Any]
    """Value by differing key; `ABSENT` if the configuration lacks it."""
    runs: tuple[Run, ...]
    """One run per seed."""
    numbers: Mapping[str, Mapping[object, float]]
    """Known values by metric and seed; NaN if the run diverged."""
    estimates: Mapping[str, Estimate | None]
    """Mean over seeds that have not diverged, by metric."""
    deltas: Mapping[str, Delta | None]
    """Difference to the baseline by metric; None in the baseline's row."""

    @property
    def states(self) -> dict[str, int]:
        """Number of runs in each state."""
        return dict(Counter(run.state for run in self.runs))

    def diverged(self, metric: str) -> int:
        """Number of runs whose metric is not finite."""
        return sum(not math.isfinite(number) for number in self.numbers[metric].values())


def finite(numbers: Mapping[object, float]) -> dict[object, float]:
    """Numbers of the runs that have not diverged."""
    return {seed: number for seed, number in numbers.items() if math.isfinite(number)}


SHORTEST_ID = 4
"""Minimum length of a run id prefix."""


@dataclass(frozen=True)
class Selection:
    """Selected runs."""

    runs: tuple[Run, ...]
    """Runs in command-line order; within a study, in point order."""
    study: StudyRecord | None
    """Study record, if exactly one study was selected."""
    name: str
    folder: Path
    """Output folder."""
    notes: tuple[str, ...] = ()
    """Remarks about missing, unreadable or omitted runs."""


def select(names: Sequence[str], runs: Path) -> Selection:
    """Find and read runs by study name, run folder, folder of runs, run id prefix, or glob pattern.

    Names and ids are looked up in `runs`, the value of `paths.runs`. Raises UserError if an argument matches no run, or
    no matching run can be read.
    """
    if not names:
        raise UserError(f"compare takes a study, or run folders, ids or patterns. {_offer(runs)}")
    found = [folder for name in names for folder in _folders(name, runs)]
    folders = list(dict.fromkeys(folder.resolve() for folder in found))
    parents = list(dict.fromkeys(folder.parent for folder in folders))
    whole = len(names) == 1 and _study_folder(names[0], runs) is not None
    study = read_study_record(parents[0]) if len(parents) == 1 else None
    notes: list[str] = []
    if whole and study is not None and study.points:
        folders = _points_of(study, parents[0], folders, notes)
    read = list(_read(folders, notes))
    if not read:
        raise UserError(" ".join(["None of these runs can be read.", *notes]))
    name = study.name if study else _name(parents, runs)
    return Selection(tuple(read), study, name, _relative(parents[0]) if len(parents) == 1 else runs, tuple(notes))


def _folders(word: str, runs: Path) -> list[Path]:
    study = _study_folder(word, runs)
    if study is not None:
        return readable_runs(study)
    for path in (Path(word).expanduser(), runs / word):
        if _is_run(path):
            return [path]
    if any(mark in word for mark in "*?["):
        matches = [*_glob(Path(), word), *_glob(runs, word)]
        found = [run for match in matches for run in ([match] if is_readable_run(match) else readable_runs(match))]
        if found:
            return found
    elif len(word) >= SHORTEST_ID and "/" not in word:
        found = [path for path in _glob(runs, f"*/{word}*") if is_readable_run(path)]
        if len({path.name for path in found}) > 1:
            matches = listed(sorted(path.name for path in found), "and")
            raise UserError(f"{word}: {matches} begin with it. Give more of the id.")
        if found:
            return found
    raise UserError(f"{word} is no study, run folder, run id or pattern. {_offer(runs, word)}")


def _study_folder(word: str, runs: Path) -> Path | None:
    """Folder of runs by name, below `paths.runs` or the current folder."""
    for path in (runs / word, Path(word).expanduser()):
        if word and path.is_dir() and not _is_run(path) and readable_runs(path):
            return path
    return None


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _glob(folder: Path, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_absolute():
        folder, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    return sorted(folder.glob(pattern))


def _points_of(study: StudyRecord, folder: Path, folders: list[Path], notes: list[str]) -> list[Path]:
    """Runs of a study in point order; adds remarks about missing points and other runs."""
    there = {path.name: path for path in folders}
    if study.skipped:
        reasons = [f"{label} ({reason.strip().splitlines()[-1].strip()})" for label, reason in study.skipped.items()]
        notes.append(f"{format_items(len(reasons), 'point')} of the study cannot run: {_some(reasons)}.")
    missing = [label or run for run, label in study.points.items() if run not in there]
    others = [name for name in there if name not in study.points]
    if missing:
        notes.append(f"{format_items(len(missing), 'point')} of the study without a run yet: {_some(missing)}.")
    if others:
        runs = format_items(len(others), "run")
        notes.append(f"{runs} in the study's folder belong to no point: {_some(others)}. Name a run to include it.")
    found = [there[run] for run in study.points if run in there]
    if study.rungs and found:
        begun = [path for path in found if _has_begun(path)]
        furthest = {(study.points[path.name], study.seeds.get(path.name)): path for path in begun}
        points = format_items(len(furthest), "point")
        notes.append(
            f"{format_items(len(found), 'run')} of {len(study.rungs)} rungs are {points}; each is the run of its last "
            "rung, whose curve begins with the rungs before."
        )
        found = list(furthest.values())
    return found or [folder / name for name in others]


def _has_begun(folder: Path) -> bool:
    """True if a run has logged a step."""
    path = folder / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def _read(folders: Sequence[Path], notes: list[str]) -> Iterator[Run]:
    for folder in folders:
        try:
            yield read_run(_relative(folder))
        except UserError as error:
            notes.append(f"Left out: {error}")


def _relative(folder: Path) -> Path:
    """Path relative to the current folder, if it is below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _name(parents: Sequence[Path], runs: Path) -> str:
    return " + ".join(path.name for path in parents) if len(parents) <= 3 else runs.name


def _offer(runs: Path, word: str = "") -> str:
    studies = [path.name for path in sorted(runs.glob("*")) if readable_runs(path)]
    if not studies:
        return f"{runs} contains no runs; paths.runs=FOLDER looks elsewhere."
    return did_you_mean(word, studies) or f"{runs} holds {_some(studies)}; paths.runs=FOLDER looks elsewhere."


def _some(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return listed(names, "and") if more <= 0 else f"{', '.join(names[:most])} and {more} more"
