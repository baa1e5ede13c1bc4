"""Run selection by folder, id, pattern or study name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.compare.run_record import Run, read_run
from titan_exp.compare.study_runs import StudyRecord, read_study_record
from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.number_format import format_items
from titan_exp.tracking.run_folder.readable_runs import is_readable_run, readable_runs

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
