"""Lookup of runs and studies: by study, study/label, id prefix, path, path pattern, or URL."""

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any, TypedDict

from titan_exp.config.checkpoint_files import is_url
from titan_exp.config.errors.user_error import UserError, did_you_mean, listed, shown
from titan_exp.config.foreign_file import of_kind, read_text
from titan_exp.config.schema.identity_keys import flatten
from titan_exp.config.study.labels import names_all, words_of
from titan_exp.config.study.ladder import LadderRung
from titan_exp.launch.ledger import Registration
from titan_exp.tracking.run_folder.files import FileLock, LockHolder, is_held, write_atomically
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder, is_readable_run, read_json, readable_runs


class RoundsRecord(TypedDict, total=False):
    """Metric and better direction that decide later rounds; with halving, also rungs and the kept fraction."""

    metric: str
    better: str
    rungs: list[Any]
    keep: Any


@dataclass(frozen=True)
class StudyRun:
    """Study point and its run. Several points may share a run."""

    label: str  # varied values, including the seed
    variant: str  # varied values without the seed; runs of one variant are repetitions
    seed: int | None
    run_id: str  # run id, which is also the folder's name
    experiment_id: str
    processes: int
    steps: int
    kind: str
    overrides: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)  # name of the chosen value by named list
    round: int = 1  # rung of successive halving, or batch of Optuna, from 1
    typed: tuple[str, ...] = ()  # keys that the command line set to values that the study's file does not have
    rung: LadderRung | None = None  # size and length of a point of a ladder


@dataclass(frozen=True)
class LadderRecord:
    """Ladder of a study, for `compare`."""

    metric: str
    better: str
    baseline: str  # arm that is the baseline; empty without axes
    runs: int


@dataclass(frozen=True)
class StudyRecord:
    """Content of study.json."""

    name: str
    question: str
    size: str  # chosen size; empty if the study has none
    typed: tuple[str, ...]
    baseline: str | None  # baseline variant of the comparison
    metrics: Mapping[str, str]  # better direction, `min` or `max`, by compared metric
    points: tuple[StudyRun, ...]  # points that can run, in study order
    skipped: Mapping[str, str]  # skip reasons of all other points, by label
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys that a named list sets together
    rounds: RoundsRecord = field(default_factory=RoundsRecord)  # empty if all points start together
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # kind and bounds of each range, by key
    tune: str = ""  # key over which each group of the comparison is tuned
    others: tuple[StudyRun, ...] = ()  # points of earlier calls that the last one did not ask for
    registered: Registration | None = None  # question, as registered before the first run
    dropped: str = ""  # reason for ending the question between looks; empty if it goes on, or ended at a look
    removed: tuple[StudyRun, ...] = ()  # points of earlier calls that the study's file no longer has
    ladder: LadderRecord | None = None  # ladder of sizes; None of another study
    time: float = 0.0

    @cached_property
    def by_run(self) -> Mapping[str, StudyRun]:
        """Points by run id."""
        return {point.run_id: point for point in self.points}

    @property
    def command(self) -> str:
        """Last call, as typed."""
        return sweep_command(self.name, self.size, self.typed)

    @property
    def rungs(self) -> Sequence[str]:
        """Rungs of successive halving; empty without halving."""
        return self.rounds.get("rungs", ())

    @property
    def is_adaptive(self) -> bool:
        """True for a search or successive halving."""
        return bool(self.rounds or self.parameters)


def study_record(values: dict[str, Any]) -> StudyRecord:
    """Record that any release wrote. Each writes further fields, and an earlier one lacks some, which are empty here;
    no point lacks its run and variant."""
    no_study = StudyRecord(name="", question="", size="", typed=(), baseline=None, metrics={}, points=(), skipped={})
    no_run = StudyRun(
        label="", variant="", seed=None, run_id="", experiment_id="", processes=0, steps=0, kind="", overrides=()
    )
    record, point = (json.loads(json.dumps(asdict(one))) for one in (no_study, no_run))
    del point["run_id"], point["variant"]
    runs = {
        name: [{**point, **one} if isinstance(one, dict) else one for one in values[name]]
        for name in ("points", "others", "removed")
        if isinstance(values.get(name), list)
    }
    return of_kind(StudyRecord, {**record, **values, **runs})


def sweep_command(name: str, size: str, typed: Sequence[str]) -> str:
    """Command that launches a study."""
    return shlex.join(["titan-exp", "sweep", name, *([f"size={size}"] if size else []), *typed])


class StudyFolder:
    """Folder of a study and its runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.yaml = path / "study.yaml"  # study file as of the last launch
        self.json = path / "study.json"
        self.history = path / "history"  # earlier versions of study.yaml and study.json
        self.stop = path / "stop"  # stop flag: no further run is started
        self.lock = path / ".lock"  # lock of the process that runs the study on this machine

    def run(self, point: StudyRun) -> RunFolder:
        """Run folder of a point; may not exist yet."""
        return RunFolder(self.path / point.run_id)

    def read(self) -> StudyRecord | None:
        """Read study.json; None if missing. Raises UserError if it is not a study record."""
        return read_json(self.json, StudyRecord)

    def write(self, record: StudyRecord, text: str) -> StudyRecord:
        """Write study.yaml, from `text`, and study.json, archiving earlier versions; returns the record of now."""
        self.path.mkdir(parents=True, exist_ok=True)
        before, now = self.read(), replace(record, time=time.time())
        if before is not None:
            same = self.yaml.exists() and read_text(self.yaml) == text
            if same and replace(before, time=now.time) == now:
                return before
            # A later round adds points, which does not make a new version.
            if not same or now.points[: len(before.points)] != before.points:
                self.history.mkdir(exist_ok=True)
                number = len(list(self.history.glob("*.json"))) + 1
                for path in filter(Path.exists, (self.yaml, self.json)):
                    write_atomically(self.history / f"{number:03d}{path.suffix}", read_text(path))
        write_atomically(self.yaml, text)
        write_atomically(self.json, json.dumps(asdict(now), indent=1) + "\n")
        return now

    def with_earlier(self, record: StudyRecord, is_in_file: Callable[[StudyRun], bool]) -> StudyRecord:
        """Record with points of earlier calls: those in the study's file that it does not ask for, and removed ones."""
        before, kept = self.read(), {point.run_id for point in record.points}
        runs = () if before is None else (*before.removed, *before.others, *before.points)
        earlier = [point for point in {run.run_id: run for run in runs}.values() if point.run_id not in kept]
        removed = tuple(point for point in earlier if not is_in_file(point))
        return replace(record, others=tuple(filter(is_in_file, earlier)), removed=removed)

    def holder(self) -> LockHolder | None:
        """Process that currently runs the study; None without one."""
        return FileLock(self.lock).holder() if is_held(self.lock) else None

    def request_stop(self, reason: str) -> None:
        """Set the stop flag."""
        write_atomically(self.stop, reason + "\n")


NAMED = "Name a run by its path, the beginning of its id, STUDY/LABEL or its URL, and a study by its name."


@dataclass(frozen=True)
class RunEntry:
    """Run found by name."""

    folder: RunFolder  # run folder; may not exist if its study has not started it
    label: str
    group: str  # name of the parent folder: a study or an `experiment.name`
    point: StudyRun | None = None  # point of the study; None outside a study
    asked: bool = True
    removed: bool = False
    rungs: int = 0  # number of rungs of its study; 0 without successive halving

    @cached_property
    def run(self) -> Run:
        """Reader of its files."""
        return Run(self.folder)

    @property
    def train_arguments(self) -> list[str]:
        """Arguments of `titan-exp train` that continue the run, wherever its paths.runs is relative to."""
        path = self.folder.path
        return ["--config-path", str(path), *([f"paths.runs={path.parents[1]}"] if path.is_absolute() else [])]

    @property
    def start_command(self) -> str:
        """Command that starts or continues the run, with others of its study."""
        words = ["train", *self.train_arguments] if self.point is None else ["sweep", self.group]
        return shlex.join(["titan-exp", *words])


def runs_folder(typed: str | Path = "") -> Path:
    """Folder of runs as typed; by default, the folder that `train` uses."""
    from titan_exp.config.extension import CONF_DIR

    if not typed and (CONF_DIR / "local" / "default.yaml").is_file():
        from titan_exp.config.hydra.compose import compose

        typed = compose().paths.runs
    return Path(typed or "runs").expanduser()


def named_runs(words: Sequence[str]) -> list[str]:
    """Check that the words are names of runs. Raises UserError if one is an override."""
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and re.fullmatch(r"[\w.]+", key) and not Path(word).exists():
            raise UserError(f"{word}: a run that exists takes no overrides other than paths.runs=FOLDER.")
    return list(words)


def find_runs(names: Sequence[str], runs: Path) -> list[RunEntry]:
    """Find runs by name, each once; without names all, newest first. Raises UserError about an unknown name."""
    found = [entry for name in names for entry in _find(name, runs)] if names else _all(runs)
    return list({entry.folder.path: entry for entry in found}.values())


def require_one(found: Sequence[RunEntry], name: str) -> RunEntry:
    """The single run among those found. Raises UserError if there are several."""
    if len(found) > 1:
        labels = "\n".join(f"  {entry.label}  {entry.folder.path.name}" for entry in found[:8])
        raise UserError(f"{name}: this matches {len(found)} runs. Name one of them:\n{labels}")
    return found[0]


def run_path(name: str, runs: Path | str = "") -> str:
    """Folder of a run that is named by label, id prefix, or the folder of an experiment with one run. Other paths and
    URLs are returned as they are; the reader of weights explains them. Raises UserError about another name that matches
    no run, or several."""
    path = Path(name).expanduser()
    if not name or is_url(name):
        return name
    is_group = path.is_dir() and not (path / "config.yaml").exists() and any(readable_runs(path))
    if path.exists() and not is_group:
        return name
    try:
        found = find_runs([name], runs_folder(runs))
    except UserError:
        if "/" in name or name.endswith((".pt", ".pth")):
            return name
        raise
    return str(require_one(found, name).folder.path)


def find_study_folder(word: str, runs: Path) -> StudyFolder | None:
    """Find a study folder by path or name; None if there is none."""
    folders = (StudyFolder(path) for path in (Path(word).expanduser(), runs / word))
    return next((folder for folder in folders if folder.json.is_file()), None)


def run_groups(runs: Path) -> list[str]:
    """Studies and experiment names with runs, newest first."""
    if not runs.is_dir():
        return []
    shown = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    found = [path for path in shown if any(readable_runs(path))]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def _all(runs: Path) -> list[RunEntry]:
    found = []
    for group in [runs / name for name in run_groups(runs)]:
        try:
            StudyFolder(group).read()
        except UserError as error:
            print(error, file=sys.stderr)
        found += [entry for entry in _in_group(group) if is_readable_run(entry.folder.path)]
    return sorted(found, key=lambda entry: -_mtime(entry.folder))


def _find(word: str, runs: Path) -> list[RunEntry]:
    if is_url(word):
        return [_entry(_folder_of_url(word, runs))]
    path = Path(word).expanduser()
    for place in (path, runs / word):
        if (place / "config.yaml").is_file():
            return [_entry(place)]
        if place.is_dir() and any(_in_group(place)) and word not in ("", "."):
            return _in_group(place)
    if any(mark in word for mark in "*?["):
        places = dict.fromkeys(place for folder in (Path(), runs) for place in _matches(folder, word))
        found = [run for place in places for run in ([place] if is_readable_run(place) else readable_runs(place))]
        if found:
            return [_entry(run) for run in found]
    name, slash, label = word.partition("/")
    if slash and (runs / name).is_dir():
        if found := _labelled(label, among := _in_group(runs / name)):
            return found
        labels = [entry.label for entry in among]
        offer = did_you_mean(label, labels) or f"its runs are {listed(labels[:6], 'and')}"
        raise UserError(f"{word}: {name} has no such run ({offer})")
    if re.fullmatch(r"[0-9a-f]{3,12}", word):
        found = [_entry(place) for place in runs.glob(f"*/{word}*") if is_readable_run(place)]
        if len({entry.folder.path.name for entry in found}) > 1:
            paths = listed([str(entry.folder.path) for entry in found[:4]], "and")
            raise UserError(f"{word}: {len(found)} ids begin like this: {paths}")
        if found:
            return found
    known = run_groups(runs)
    offer = did_you_mean(word, known) or (f"Those in {runs}/ are {listed(known[:8], 'and')}." if known else "")
    nothing = "" if known else f"There is no run under {runs}/. To look elsewhere, add paths.runs=FOLDER. "
    raise UserError(f"{word}: unknown run or study. {nothing}{offer[:1].upper()}{offer[1:]}\n  {NAMED}")


def _matches(folder: Path, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_absolute():
        folder, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    return sorted(folder.glob(pattern))


def _folder_of_url(url: str, runs: Path) -> Path:
    """Folder on this machine of the run at a URL: its remote copy `.../NAME/ID`, its W&B page, or `file://`."""
    *_, name, run_id = ["", *url.partition("://")[2].rstrip("/").split("/")]
    for place in (Path(url.removeprefix("file://")), runs / name / run_id, *_matches(runs, f"*/{escape(run_id)}")):
        if is_readable_run(place):
            return place
    raise UserError(
        f"{url}: this verb reads the folder of a run, and {runs}/ has none of this one. To look elsewhere, add "
        "paths.runs=FOLDER. titan-exp generate, evaluate, convert and checkpoint.continue_from read its checkpoints "
        "there."
    )


def _entry(path: Path) -> RunEntry:
    outside = RunEntry(RunFolder(path), f"{path.parent.name}/{path.name}", path.parent.name)
    return next((entry for entry in _in_group(path.parent) if entry.folder.path == path), outside)


def _in_group(path: Path) -> list[RunEntry]:
    """Runs of a study's last call in order, then those of earlier calls, its removed runs, other runs in its folder."""
    study, record = StudyFolder(path), None
    found: dict[Path, RunEntry] = {}
    with suppress(UserError):  # damaged: its runs count as outside any study
        record = study.read()
    if record is not None:
        groups = ((record.points, True, False), (record.others, False, False), (record.removed, False, True))
        for points, asked, removed in groups:
            for point in points:
                folder = study.run(point)
                if asked or folder.path.is_dir():
                    entry = RunEntry(folder, point.label, path.name, point, asked, removed, len(record.rungs))
                    found.setdefault(folder.path, entry)
    others = [RunEntry(RunFolder(place), f"{path.name}/{place.name}", path.name) for place in readable_runs(path)]
    for entry in sorted(others, key=lambda entry: -_mtime(entry.folder)):
        found.setdefault(entry.folder.path, entry)
    return list(found.values())


def _labelled(label: str, among: Sequence[RunEntry]) -> list[RunEntry]:
    """Find runs by label, those of the last call before others; by words of it, by id prefix, or by values of their
    configuration. Words have any order and spelling."""
    some = [entry for entry in among if names_all(label, words_of(entry.label))]
    exact = [entry for entry in some if names_all(entry.label, words_of(label))]
    found = [entry for entry in exact if entry.asked] or exact or some
    found = found or [entry for entry in among if len(label) >= 3 and entry.folder.path.name.startswith(label)]
    for entry in among if "=" in label and not found else ():
        with suppress(UserError):  # its configuration cannot be read
            values = [f"{key}={shown(value)}" for key, value in flatten(entry.run.config).items()]
            if names_all(label, [*(entry.run.overrides or ()), *values]):
                found.append(entry)
    return found


def _mtime(folder: RunFolder) -> float:
    for path in (folder.state, folder.config):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0
