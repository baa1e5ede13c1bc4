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
from titan_exp.config.study.ladder import LadderRung
from titan_exp.launch.executor import summarize_worlds
from titan_exp.launch.ledger import Registration
from titan_exp.launch.run_lookup import LadderRecord, find_runs, sweep_command
from titan_exp.launch.run_status import run_statuses
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder import run_folder
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows
from titan_exp.tracking.run_folder.metrics_jsonl import Row as MetricRow
from titan_exp.tracking.run_folder.run import Lineage, PredictedMetrics, Run, RunStatus, read_history

STUDY_FILE = "study.json"


@dataclass(frozen=True)
class StudyRecord:
    """Study as recorded at launch; runs started by hand have none."""

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
    others: Mapping[str, str] = field(default_factory=dict)
    """Labels of points of earlier calls that the last one did not ask for, by run id."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Labels of points that the study's file no longer has, by run id."""
    command: str = ""
    """Last call, as typed."""
    seeds: Mapping[str, int | None] = field(default_factory=dict)
    """Seed of each point, by run id."""
    rounds: Mapping[str, Any] = field(default_factory=dict)
    """Metric and better direction that decide later rounds, with rungs and kept fraction of successive halving."""
    rounds_of: Mapping[str, int] = field(default_factory=dict)
    """Rung or batch, from 1, by run id."""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Kind and bounds of each range of a search, by key."""
    tune: str = ""
    """Key over which each group is tuned."""
    registered: Registration | None = None
    """Question, as registered before the first run."""
    dropped: str = ""
    """Reason for ending the question between looks; empty if it goes on, or ended at a look."""
    ladder: LadderRecord | None = None
    """Ladder of sizes; None of another study."""
    ladder_rungs: Mapping[str, LadderRung] = field(default_factory=dict)
    """Size and length of each point of a ladder, by run id."""

    @property
    def rungs(self) -> Sequence[str]:
        """Rungs of successive halving; empty without halving."""
        return self.rounds.get("rungs", ())

    @property
    def is_adaptive(self) -> bool:
        """True for a search or successive halving."""
        return bool(self.rounds or self.parameters)


def read_study_record(folder: Path) -> StudyRecord | None:
    """Read the study record of a folder of runs; None if missing. Raises UserError if it is not a study record."""
    found = run_folder.read_json(folder / STUDY_FILE, _Study)
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
        others={point["run_id"]: point.get("label", "") for point in found.get("others", [])},
        removed={point["run_id"]: point.get("label", "") for point in found.get("removed", [])},
        command=sweep_command(found.get("name") or folder.name, found.get("size", ""), found.get("typed", [])),
        seeds={point["run_id"]: point.get("seed") for point in points},
        rounds=found.get("rounds", {}),
        rounds_of={point["run_id"]: point.get("round", 1) for point in points},
        parameters=found.get("parameters", {}),
        tune=found.get("tune", ""),
        registered=found.get("registered"),
        dropped=found.get("dropped", ""),
        ladder=found.get("ladder"),
        ladder_rungs={point["run_id"]: rung for point in points if (rung := point.get("rung")) is not None},
    )


class _Point(TypedDict):
    run_id: str
    variant: str
    label: NotRequired[str]
    choices: NotRequired[dict[str, str]]
    seed: NotRequired[int | None]
    round: NotRequired[int]
    rung: NotRequired[LadderRung | None]


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
    others: list[_Point]
    removed: list[_Point]
    size: str
    typed: list[str]
    rounds: _Rounds
    parameters: dict[str, dict[str, Any]]
    tune: str
    registered: Registration | None
    dropped: str
    ladder: LadderRecord | None


@dataclass(frozen=True)
class ComparedRun:
    """One run, finished or not; unknown fields are None."""

    study: str
    """`experiment.name`, the parent folder's name, or the W&B group."""
    run_id: str
    experiment_id: str | None
    state: str
    """State as in `titan-exp status`."""
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
    """Seconds lost to failures of worlds, over all attempts; None if the run has one world."""
    predicted: PredictedMetrics = field(default_factory=PredictedMetrics)
    """Predictions made before the start."""
    lineage: Lineage | None = None
    """Parent of a continued run, and the step; the run's `rows` begin with its parent's."""
    parent: "ComparedRun | None" = None
    """Parent of a continued run; None if it is not on this machine."""

    @property
    def shown(self) -> str:
        """Word for the state."""
        return run_folder.shown_state(self.state, self.reason)

    @property
    def seed(self) -> int | None:
        """Seed of initial weights and data order."""
        return self.config.get("experiment", {}).get("seed")

    @property
    def begins(self) -> int:
        """Tokens that its ancestors had trained on when the run was continued; 0 for other runs."""
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


def read_run(run: Run | Path, status: RunStatus | None = None) -> ComparedRun:
    """Read a run folder in any state; without `status`, its scheduler is not asked. Raises UserError if it has no
    configuration or a damaged file."""
    found = run if isinstance(run, Run) else Run(run)
    folder, config, status = found.folder, found.config, status or found.status
    if status.state == "unreadable":
        raise UserError(status.reason or "")
    code, attempts = found.code, found.attempts
    ancestor = found.ancestors[0] if found.ancestors else None
    alive = status.state in ("running", "lost", "unknown")
    spans = [
        (attempt, _seconds(attempt, found.heartbeat if alive and attempt is attempts[-1] else None))
        for attempt in attempts
    ]
    known = [(attempt, seconds) for attempt, seconds in spans if seconds is not None]
    return ComparedRun(
        study=str((config.get("experiment") or {}).get("name") or folder.path.resolve().parent.name),
        run_id=(code and code.run_id) or folder.path.resolve().name,
        experiment_id=code and code.experiment_id,
        state=status.state,
        reason=status.reason,
        config=config,
        rows=read_history(folder.path),
        world_size=attempts[-1].world_size if attempts else None,
        seconds=sum(seconds for _, seconds in known) if known else None,
        device_seconds=sum(seconds * attempt.world_size for attempt, seconds in known) if known else None,
        device=_device(found),
        commit=code and code.parts[0].commit,
        dirty=code and code.dirty,
        overrides=found.overrides or (),
        source=str(run),
        lost_seconds=None if (worlds := summarize_worlds(folder)) is None else worlds.lost,
        predicted=found.predicted,
        lineage=None if ancestor is None else ancestor.lineage,
        parent=None if ancestor is None or ancestor.folder is None else _read_parent(ancestor.folder),
    )


def _read_parent(folder: Path) -> ComparedRun | None:
    with suppress(UserError):  # removed in part: its cost is unknown
        return read_run(folder)
    return None


def _seconds(attempt: run_folder.Attempt, beat: run_folder.Heartbeat | None) -> float | None:
    if attempt.start is None:
        return None
    end = attempt.end if attempt.end is not None else None if beat is None else min(beat.time, time.time())
    return None if end is None else max(0.0, end - attempt.start)


def _device(run: Run) -> str | None:
    try:
        found = run.environment or {}
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
    runs: tuple[ComparedRun, ...]
    """One run per seed."""
    numbers: Mapping[str, Mapping[object, float]]
    """Known values by metric and seed; NaN if the run diverged."""
    estimates: Mapping[str, Estimate | None]
    """Mean over seeds that have not diverged, by metric."""
    deltas: Mapping[str, Delta | None]
    """Difference to the baseline by metric; None in the baseline's row."""
    is_named: bool = False
    """True if the label is a name given by the study, rather than values of keys."""

    def name_of(self, run: ComparedRun) -> str:
        """Label, with the seed if the row has several: `lr=0.003 seed=0`."""
        return self.label if len(self.runs) == 1 else f"{self.label} seed={run.seed}"

    @property
    def shown_states(self) -> dict[str, int]:
        """Number of runs by the displayed word for their state."""
        return dict(Counter(run.shown for run in self.runs))

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


@dataclass(frozen=True)
class Selection:
    """Selected runs."""

    runs: tuple[ComparedRun, ...]
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
        raise UserError(f"Name a study, or run folders, ids or patterns. {_offer(runs)}")
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
        raise UserError(" ".join(["We cannot read any of these runs.", *notes]))
    name = study.name if study else _name(parents, runs)
    return Selection(tuple(read), study, name, _relative(parents[0]) if len(parents) == 1 else runs, tuple(notes))


def _folders(word: str, runs: Path) -> list[Path]:
    study = _study_folder(word, runs)
    if study is not None:
        return run_folder.readable_runs(study)
    return [entry.folder.path for entry in find_runs([word], runs) if run_folder.is_readable_run(entry.folder.path)]


def _study_folder(word: str, runs: Path) -> Path | None:
    """Folder of runs by name, below `paths.runs` or the current folder."""
    for path in (runs / word, Path(word).expanduser()):
        if word and path.is_dir() and not _is_run(path) and run_folder.readable_runs(path):
            return path
    return None


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _points_of(study: StudyRecord, folder: Path, folders: list[Path], notes: list[str]) -> list[Path]:
    """Runs of a study in point order; adds remarks about missing points and other runs."""
    there = {path.name: path for path in folders}
    if study.skipped:
        reasons = [f"{label} ({reason.strip().splitlines()[-1].strip()})" for label, reason in study.skipped.items()]
        notes.append(f"{format_items(len(reasons), 'point')} of the study cannot run: {_some(reasons)}.")
    missing = [
        _with_seed(label or run, study.seeds.get(run)) for run, label in study.points.items() if run not in there
    ]
    others = [name for name in there if name not in study.points]
    if missing:
        notes.append(f"{format_items(len(missing), 'point')} of the study without a run yet (new): {_some(missing)}.")
    left_out = {
        f"not in the last call ({study.command})": study.others,
        "of points that the study's file no longer has": study.removed,
        "of no point": {name: name for name in others if name not in {**study.others, **study.removed}},
    }
    for reason, labels in left_out.items():
        names = [label for name, label in labels.items() if name in others]
        if names:
            runs = format_items(len(names), "run")
            notes.append(f"{runs} left out, {reason}: {_some(names)}. Name a run to include it.")
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


def _with_seed(label: str, seed: int | None) -> str:
    return label if seed is None else f"{label} seed={seed}"


def _has_begun(folder: Path) -> bool:
    """True if a run has logged a step."""
    path = folder / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def _read(folders: Sequence[Path], notes: list[str]) -> Iterator[ComparedRun]:
    runs = [Run(_relative(folder)) for folder in folders]
    statuses = run_statuses(runs)
    for run in runs:
        try:
            yield read_run(run, statuses[run.folder.path])
        except UserError as error:
            notes.append(f"Left out: {error}")


def _relative(folder: Path) -> Path:
    """Path relative to the current folder, if it is below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _name(parents: Sequence[Path], runs: Path) -> str:
    return " + ".join(path.name for path in parents) if len(parents) <= 3 else runs.name


def _offer(runs: Path, word: str = "") -> str:
    studies = [path.name for path in sorted(runs.glob("*")) if run_folder.readable_runs(path)]
    if not studies:
        return f"{runs} contains no runs. To look elsewhere, add paths.runs=FOLDER."
    return did_you_mean(word, studies) or f"{runs} holds {_some(studies)}. To look elsewhere, add paths.runs=FOLDER."


def _some(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return listed(names, "and") if more <= 0 else f"{', '.join(names[:most])} and {more} more"
