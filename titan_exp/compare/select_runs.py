"""Which runs are meant: folders, ids, patterns and names of studies, turned into runs that were read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.compare.run_record import Run, read_run
from titan_exp.compare.study_runs import StudyRecord, read_study_record
from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError

SHORTEST_ID = 4
"""So many digits of a run id name it, where no other begins with them."""


@dataclass(frozen=True)
class Selection:
    """Runs to compare, and what is to be said about those that are not among them."""

    runs: tuple[Run, ...]
    """In the order in which they were named; within a study, in that of its points."""
    study: StudyRecord | None
    """The study, where exactly one was named."""
    name: str
    """What to call the comparison."""
    folder: Path
    """Where its files belong."""
    notes: tuple[str, ...] = ()
    """Sentences about runs that are missing, unreadable or left out."""


def select(words: Sequence[str], runs: Path) -> Selection:
    """Find and read runs.

    Args:
        words: names of studies, run folders, folders of runs, run ids or their beginnings, or patterns of any of them.
        runs: `paths.runs`, where names and ids are looked up.

    Raises:
        UserError: a word names nothing, or no run that could be read is left.
    """
    if not words:
        raise UserError(f"Which runs? Name a study, or run folders, ids or patterns. {_offer(runs)}")
    found = [folder for word in words for folder in _folders(word, runs)]
    folders = list(dict.fromkeys(folder.resolve() for folder in found))
    parents = list(dict.fromkeys(folder.parent for folder in folders))
    whole = len(words) == 1 and _study_folder(words[0], runs) is not None
    study = read_study_record(parents[0]) if len(parents) == 1 else None
    notes: list[str] = []
    if whole and study is not None and study.points:
        folders = _points_of(study, parents[0], folders, notes)
    read = list(_read(folders, notes))
    if not read:
        raise UserError(" ".join(["None of these runs can be read.", *notes]))
    name = study.name if study else _name(parents, runs)
    return Selection(tuple(read), study, name, _shown(parents[0]) if len(parents) == 1 else runs, tuple(notes))


def _folders(word: str, runs: Path) -> list[Path]:
    study = _study_folder(word, runs)
    if study is not None:
        return _runs_in(study)
    for path in (Path(word).expanduser(), runs / word):
        if _is_run(path):
            return [path]
    if any(mark in word for mark in "*?["):
        matches = [*_glob(Path(), word), *_glob(runs, word)]
        found = [run for match in matches for run in ([match] if _is_run(match) else _runs_in(match))]
        if found:
            return found
    elif len(word) >= SHORTEST_ID and "/" not in word:
        found = [path for path in _glob(runs, f"*/{word}*") if _is_run(path)]
        if len({path.name for path in found}) > 1:
            raise UserError(
                f"{word}: {listed(sorted(path.name for path in found), 'and')} begin so. Give more of the id."
            )
        if found:
            return found
    raise UserError(f"{word}: there is no such study, run folder, run id or pattern. {_offer(runs, word)}")


def _study_folder(word: str, runs: Path) -> Path | None:
    """The folder of runs that a word names, here or under `paths.runs`."""
    for path in (runs / word, Path(word).expanduser()):
        if word and path.is_dir() and not _is_run(path) and _runs_in(path):
            return path
    return None


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and _is_run(path)]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _glob(folder: Path, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_absolute():
        folder, pattern = Path(path.anchor), str(path.relative_to(path.anchor))
    return sorted(folder.glob(pattern))


def _points_of(study: StudyRecord, folder: Path, folders: list[Path], notes: list[str]) -> list[Path]:
    """The study's own runs in the order of its points; says which are missing and which are no points of it."""
    there = {path.name: path for path in folders}
    if study.skipped:
        reasons = [f"{label} ({reason.strip().splitlines()[-1].strip()})" for label, reason in study.skipped.items()]
        notes.append(f"{_count(reasons, 'point')} of the study cannot run: {_some(reasons)}.")
    missing = [label or run for run, label in study.points.items() if run not in there]
    others = [name for name in there if name not in study.points]
    if missing:
        notes.append(f"{_count(missing, 'point')} of the study without a run yet: {_some(missing)}.")
    if others:
        are = "is no point" if len(others) == 1 else "are no points"
        notes.append(
            f"{_count(others, 'run')} in its folder {are} of the study, left out: {_some(others)}. "
            "Name a run to take it in."
        )
    return [there[run] for run in study.points if run in there] or [folder / name for name in others]


def _read(folders: Sequence[Path], notes: list[str]) -> Iterator[Run]:
    for folder in folders:
        try:
            yield read_run(_shown(folder))
        except UserError as error:
            notes.append(f"Left out, since it cannot be read: {error}")


def _shown(folder: Path) -> Path:
    """As people name it: relative to the current folder where it lies below."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _name(parents: Sequence[Path], runs: Path) -> str:
    return " + ".join(path.name for path in parents) if len(parents) <= 3 else runs.name


def _offer(runs: Path, word: str = "") -> str:
    studies = [path.name for path in sorted(runs.glob("*")) if _runs_in(path)]
    if not studies:
        return f"There are no runs in {runs}; paths.runs=FOLDER names another place."
    return did_you_mean(word, studies) or f"In {runs} there is {_some(studies)}; paths.runs=FOLDER names another place."


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _some(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return listed(names, "and") if more <= 0 else f"{', '.join(names[:most])} and {more} more"
