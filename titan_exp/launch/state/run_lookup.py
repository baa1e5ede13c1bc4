"""Runs and studies as users name them: by study, study/label, the beginning of an id, or path."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.state.study_folder import StudyFolder, StudyRecord, StudyRun
from titan_exp.tracking.run_folder.run_folder import RunFolder

NAMED = "A run is named by its path, the beginning of its id, or STUDY/LABEL; a study by its name."


@dataclass(frozen=True)
class RunEntry:
    """A run that was found."""

    folder: RunFolder
    """Its folder, which need not be there where a study has not come to it yet."""
    label: str
    """Name in tables."""
    group: str
    """Name of the folder that holds it: a study or an `experiment.name`."""
    point: StudyRun | None = None
    """The study's point, where it is one."""
    removed: bool = False
    """True if the study no longer holds it."""


def split_runs_folder(words: Sequence[str]) -> tuple[Path, list[str]]:
    """The folder of all runs, as `paths.runs=...` or the user's own defaults say it, and the other words.

    Raises:
        UserError: a word sets another key.
    """
    runs: str | None = None
    rest: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if key == "paths.runs" and equals:
            runs = value
        elif equals and re.fullmatch(r"[\w.]+", key) and "/" not in key and not Path(word).exists():
            raise UserError(f"{word}: runs that are there already take no overrides, but for paths.runs=FOLDER.")
        else:
            rest.append(word)
    return Path(runs if runs is not None else _default_runs()).expanduser(), rest


def find_runs(words: Sequence[str], runs: Path) -> list[RunEntry]:
    """The runs that words name, each once; all runs there are, newest first, without a word.

    Raises:
        UserError: a word names nothing, or the beginning of an id is that of several.
    """
    found = [one for word in words for one in _named(word, runs)] if words else _all(runs)
    return list({one.folder.path: one for one in found}.values())


def find_study_folder(word: str, runs: Path) -> StudyFolder | None:
    """The study that a word names as a whole; None where it names none."""
    for path in (Path(word).expanduser(), runs / word):
        folder = StudyFolder(path)
        if folder.json.is_file():
            return folder
    return None


def run_groups(runs: Path) -> list[str]:
    """The studies and experiment names that have runs, newest first."""
    if not runs.is_dir():
        return []
    found = [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".") and any(_inside(path))]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)]


def _default_runs() -> str:
    from titan_exp.config.hydra.compose import CONF_DIR, compose

    if (CONF_DIR / "local" / "default.yaml").is_file():
        return str(compose().paths.runs)
    return "runs"


def _all(runs: Path) -> list[RunEntry]:
    found = [one for name in run_groups(runs) for one in _in_group(runs / name) if one.folder.path.is_dir()]
    return sorted(found, key=lambda one: -_changed(one.folder))


def _named(word: str, runs: Path) -> list[RunEntry]:
    path = Path(word).expanduser()
    for place in (path, runs / word):
        if (place / "config.yaml").is_file():
            return [_one(place)]
        if place.is_dir() and any(_in_group(place)) and word not in ("", "."):
            return _in_group(place)
    name, slash, label = word.partition("/")
    if slash and (runs / name).is_dir():
        found = _labelled(label, _in_group(runs / name))
        if found:
            return found
        labels = [one.label for one in _in_group(runs / name)]
        offer = did_you_mean(label, labels) or f"{name} has {listed(labels[:6], 'and')}"
        raise UserError(f"{word}: {name} has no such run. {offer[:1].upper()}{offer[1:]}")
    if re.fullmatch(r"[0-9a-f]{3,12}", word):
        found = [_one(place) for place in runs.glob(f"*/{word}*") if (place / "config.yaml").is_file()]
        if len(found) > 1:
            raise UserError(
                f"{word}: {len(found)} runs begin so: {listed([str(one.folder.path) for one in found[:4]], 'and')}"
            )
        if found:
            return found
    known = run_groups(runs)
    offer = did_you_mean(word, known) or (f"Under {runs}/ there are {listed(known[:8], 'and')}." if known else "")
    nothing = "" if known else f"There is no run under {runs}/; paths.runs=FOLDER looks elsewhere. "
    raise UserError(f"{word}: there is no such run or study. {nothing}{offer[:1].upper()}{offer[1:]}\n  {NAMED}")


def _one(path: Path) -> RunEntry:
    """A run by its folder, with its label where a study holds it."""
    for one in _in_group(path.parent):
        if one.folder.path == path:
            return one
    return RunEntry(RunFolder(path), f"{path.parent.name}/{path.name}", path.parent.name)


def _in_group(path: Path) -> list[RunEntry]:
    """The runs of a study in its order, those it no longer holds, and any others in its folder."""
    study = StudyFolder(path)
    record: StudyRecord | None = study.read()
    found: dict[Path, RunEntry] = {}
    if record is not None:
        for point in record.points:
            folder = study.run(point)
            found.setdefault(folder.path, RunEntry(folder, point.label, path.name, point))
        for point in record.removed:
            folder = study.run(point)
            if folder.path.is_dir():
                found.setdefault(folder.path, RunEntry(folder, point.label, path.name, point, removed=True))
    others = [RunEntry(RunFolder(place), f"{path.name}/{place.name}", path.name) for place in _inside(path)]
    for one in sorted(others, key=lambda one: -_changed(one.folder)):
        found.setdefault(one.folder.path, one)
    return list(found.values())


def _inside(path: Path) -> Iterable[Path]:
    """The run folders in a folder."""
    return (place for place in path.iterdir() if place.name[:1] != "." and (place / "config.yaml").is_file())


def _labelled(label: str, among: Sequence[RunEntry]) -> list[RunEntry]:
    """Runs by their label, by words of it in any order, or by the beginning of their id."""
    exact = [one for one in among if one.label == label]
    if exact:
        return exact
    wanted = set(re.split(r"[ ,]+", label))
    by_words = [one for one in among if wanted <= set(one.label.split())]
    return by_words or [one for one in among if len(label) >= 3 and one.folder.path.name.startswith(label)]


def _changed(folder: RunFolder) -> float:
    for path in (folder.state, folder.config):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return 0.0
