"""Runs to compare: their records, rows of equal experiments, and selection by folder, id, pattern or study name."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_exp.compare.statistics import Delta, Estimate
from titan_exp.config.errors.user_error import UserError, some_of
from titan_exp.launch.executor import summarize_worlds
from titan_exp.launch.run_lookup import StudyRecord, find_runs, study_record
from titan_exp.launch.run_status import run_statuses
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder import run_folder
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, final_value
from titan_exp.tracking.run_folder.run import Lineage, PredictedMetrics, Run, RunStatus, read_history


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
    rows: MetricRows
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

    def final(self, metric: str) -> float | None:
        """Metric at the end of a run that is done; NaN if it diverged, None if it goes on or failed."""
        if run_folder.has_diverged(self.state, self.reason):
            return math.nan
        return final_value(self.rows, metric) if self.state == "done" else None

    def series(self, key: str, up_to: float = math.inf, *, above: float = -1.0) -> tuple[list[float], list[float]]:
        """Known values of a metric with their token counts, above `above` and up to `up_to` tokens."""
        return self.rows.series(key, "tokens", above=above, up_to=up_to)


def read_run(run: Run | Path, status: RunStatus | None = None) -> ComparedRun:
    """Read a run folder; without `status`, its scheduler is not asked. Raises UserError about a damaged file."""
    found = run if isinstance(run, Run) else Run(run)
    folder, config, status = found.folder, found.config, status or found.status
    if status.state == "unreadable":
        raise UserError(status.reason or "")
    code, attempts = found.code, found.attempts
    ancestor = found.ancestors[0] if found.ancestors else None
    parent = None
    if ancestor is not None and ancestor.folder is not None:
        with suppress(UserError):  # removed in part: its cost is unknown
            parent = read_run(ancestor.folder)
    alive = status.state in ("running", "lost", "unknown")
    device = None
    with suppress(UserError):
        environment = found.environment or {}
        gpus = [str(gpu.get("name")) for gpu in environment.get("gpus") or []]
        device = ", ".join(dict.fromkeys(gpus)) or environment.get("cpu")
    beats = [found.heartbeat if alive and attempt is attempts[-1] else None for attempt in attempts]
    spans = zip(attempts, map(_seconds, attempts, beats), strict=True)
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
        device=device,
        commit=code and code.parts[0].commit,
        dirty=code and code.dirty,
        overrides=found.overrides or (),
        source=str(run),
        lost_seconds=None if (worlds := summarize_worlds(folder)) is None else worlds.lost,
        predicted=found.predicted,
        lineage=None if ancestor is None else ancestor.lineage,
        parent=parent,
    )


def _seconds(attempt: run_folder.Attempt, beat: run_folder.Heartbeat | None) -> float | None:
    if attempt.start is None:
        return None
    end = attempt.end if attempt.end is not None else None if beat is None else min(beat.time, time.time())
    return None if end is None else max(0.0, end - attempt.start)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    label: str  # short names and values of the differing keys: `lr=0.003 tp=2`
    values: Mapping[str, Any]  # value by differing key; `ABSENT` if the configuration lacks it
    runs: tuple[ComparedRun, ...]  # one run per seed
    numbers: Mapping[str, Mapping[object, float]]  # known values by metric and seed; NaN if the run diverged
    estimates: Mapping[str, Estimate | None]  # mean over seeds that have not diverged, by metric
    deltas: Mapping[str, Delta | None]  # difference to the baseline by metric; None in the baseline's row
    is_named: bool = False  # True if the label is a name given by the study, rather than values of keys

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
    """Find and read runs by study name, run folder, folder of runs, run id prefix, or glob pattern. Names and ids are
    looked up in `runs`, the value of `paths.runs`. Raises UserError if an argument matches no run, or no matching run
    can be read."""
    if not names:
        studies = [path.name for path in sorted(runs.glob("*")) if run_folder.readable_runs(path)]
        here = f"{runs} holds {some_of(studies)}" if studies else f"{runs} contains no runs"
        raise UserError(
            f"Name a study, or run folders, ids or patterns. {here}. To look elsewhere, add paths.runs=FOLDER."
        )
    found = [folder for name in names for folder in _folders(name, runs)]
    folders = list(dict.fromkeys(folder.resolve() for folder in found))
    parents = list(dict.fromkeys(folder.parent for folder in folders))
    study = run_folder.read_json(parents[0] / "study.json", made=study_record) if len(parents) == 1 else None
    if study is not None:
        study = replace(study, name=study.name or parents[0].name)
    notes: list[str] = []
    if study and study.points and len(names) == 1 and _study_folder(names[0], runs):
        folders = _points_of(study, parents[0], folders, notes)
    read = list(_read(folders, notes))
    if not read:
        raise UserError(" ".join(["We cannot read any of these runs.", *notes]))
    several = " + ".join(path.name for path in parents) if len(parents) <= 3 else runs.name
    name = study.name if study else several
    return Selection(tuple(read), study, name, _relative(parents[0]) if len(parents) == 1 else runs, tuple(notes))


def _folders(word: str, runs: Path) -> list[Path]:
    study = _study_folder(word, runs)
    if study is not None:
        return run_folder.readable_runs(study)
    return [entry.folder.path for entry in find_runs([word], runs) if run_folder.is_readable_run(entry.folder.path)]


def _study_folder(word: str, runs: Path) -> Path | None:
    """Folder of runs by name, below `paths.runs` or the current folder."""
    for path in (runs / word, Path(word).expanduser()):
        if word and path.is_dir() and not (path / "config.yaml").is_file() and run_folder.readable_runs(path):
            return path
    return None


def _points_of(study: StudyRecord, folder: Path, folders: list[Path], notes: list[str]) -> list[Path]:
    """Runs of a study in point order; adds remarks about missing points and other runs."""
    there = {path.name: path for path in folders}
    if study.skipped:
        reasons = [f"{label} ({reason.strip().splitlines()[-1].strip()})" for label, reason in study.skipped.items()]
        notes.append(f"{format_items(len(reasons), 'point')} of the study cannot run: {some_of(reasons)}.")
    missing = [point for run_id, point in study.by_run.items() if run_id not in there]
    others = [name for name in there if name not in study.by_run]
    if missing:
        seeds = ["" if point.seed is None else f" seed={point.seed}" for point in missing]
        labels = [f"{point.variant or point.run_id}{seed}" for point, seed in zip(missing, seeds, strict=True)]
        notes.append(f"{format_items(len(missing), 'point')} of the study without a run yet (new): {some_of(labels)}.")
    earlier, removed = ({point.run_id: point.label for point in points} for points in (study.others, study.removed))
    left_out = {
        f"not in the last call ({study.command})": earlier,
        "of points that the study's file no longer has": removed,
        "of no point": {name: name for name in others if name not in {**earlier, **removed}},
    }
    for reason, labels in left_out.items():
        names = [label for name, label in labels.items() if name in others]
        if names:
            runs = format_items(len(names), "run")
            notes.append(f"{runs} left out, {reason}: {some_of(names)}. Name a run to include it.")
    run_ids = [run_id for run_id in study.by_run if run_id in there]
    found = [there[run_id] for run_id in run_ids]
    if study.rungs and found:
        furthest: dict[tuple[str, int | None], Path] = {}
        for run_id in run_ids:
            point, rows = study.by_run[run_id], there[run_id] / "metrics.jsonl"
            if rows.is_file() and rows.stat().st_size > 0:
                furthest[point.variant, point.seed] = there[run_id]
        points = format_items(len(furthest), "point")
        notes.append(
            f"{format_items(len(found), 'run')} of {len(study.rungs)} rungs are {points}; each is the run of its last "
            "rung, whose curve begins with the rungs before."
        )
        found = list(furthest.values())
    return found or [folder / name for name in others]


def _read(folders: Sequence[Path], notes: list[str]) -> Iterator[ComparedRun]:
    runs = [Run(_relative(folder)) for folder in folders]
    statuses = run_statuses(runs)
    for run in runs:
        try:
            yield read_run(run, statuses[run.folder.path])
        except UserError as error:
            notes.append(f"Left out: {error}")


def _relative(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
