"""Code as it was at submission: copied once for every content, so that edits while a job waits have no effect on it.

Named by a hash of what it holds, so all runs of a sweep share one copy, and it is never written to again.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import titan_exp
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.import_path import find_module, is_dotted

FOLDER = ".code"
"""Folder of the copies, beside the runs."""
ROOTS = ("titan_exp", "hydra_plugins", "conf")
"""Folders of the package in a checkout; an installed package has `conf` inside."""
OWN_LIMIT = 10_000_000
"""Bytes of Python files in the current folder's repository that are copied; more is left where it is."""
GIT_TIMEOUT = 60
"""Seconds; a repository on a slow network disk must not hold up a launch for ever."""


@dataclass(frozen=True)
class CodeSnapshot:
    """Folders from which ranks import a run's code."""

    package: str
    """The copy of our own package; it comes first."""
    own: str | None
    """The copy of the user's repository, in the place of the current folder; None where the run uses none of it."""
    loose: tuple[str, ...]
    """Files that the run imports and that could not be frozen: edits count until the job starts."""


def take_code_snapshot(runs: Path, experiments: Sequence[Experiment], package: Path | None = None) -> CodeSnapshot:
    """Copy the code that the experiments need to below `runs`, unless the same is there.

    Args:
        runs: the folder of the runs.
        experiments: the runs, of which the dotted names count.
        package: the folder of our package; the one that is imported by default.

    Raises:
        OSError: the folder cannot be written.
    """
    ours = package or Path(titan_exp.__file__).resolve().parent
    copy = _keep(runs, ours.parent, _files(ours.parent, ROOTS))
    here = Path.cwd()
    modules = [module for module in map(find_module, _dotted_names(experiments)) if module is not None]
    changing = [module for module in modules if not _is_installed(module) and ours not in module.parents]
    mine = [module for module in changing if here in module.parents]
    files = _tracked(here, ["*.py"]) if mine else None
    if files is not None and sum((here / name).stat().st_size for name in files) > OWN_LIMIT:
        files = None
    kept = {here / name for name in files or ()}
    own = str(_keep(runs, here, files)) if files and any(module in kept for module in mine) else None
    loose = sorted({str(module) for module in changing if own is None or module not in kept})
    return CodeSnapshot(str(copy), own, tuple(loose))


def _dotted_names(experiments: Sequence[Experiment]) -> list[str]:
    names = {
        name
        for run in experiments
        for name in (
            run.model.architecture,
            run.optimizer.name,
            run.lr_schedule.decay,
            run.data.source,
            run.cluster.kind,
        )
    }
    return sorted(name for name in names if is_dotted(name))


def _is_installed(module: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(module.parts))


def _files(root: Path, names: Sequence[str]) -> list[str]:
    """Files below `root / name`: what git knows or would take up, or all where the package is installed."""
    found = _tracked(root, [*names]) if _tracked(root, ["titan_exp"], others=False) else None
    if found is None:
        found = [
            path.relative_to(root).as_posix()
            for name in names
            for path in (root / name).rglob("*")
            # Another package's plugins for Hydra are not ours.
            if path.is_file() and (name != "hydra_plugins" or "titan_exp_sweeper" in path.parts)
        ]
    return [name for name in found if "__pycache__" not in name.split("/")]


def _tracked(folder: Path, patterns: Sequence[str], *, others: bool = True) -> list[str] | None:
    """Files in a repository that match, new ones included and ignored ones not; None where there is no repository."""
    kinds = ["--cached", "--others", "--exclude-standard"] if others else ["--cached"]
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "-z", *kinds, "--", *patterns],
            capture_output=True,
            timeout=GIT_TIMEOUT,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode:
        return None
    names = answer.stdout.decode(errors="surrogateescape").split("\0")
    # A file that was deleted and not yet taken out of the index is listed as well.
    return sorted({name for name in names if name and (folder / name).is_file()})


def _keep(runs: Path, root: Path, names: Sequence[str]) -> Path:
    """The copy of these files; made under another name and renamed, so it is whole or absent."""
    contents = {name: (root / name).read_bytes() for name in sorted(names)}
    target = runs / FOLDER / _digest(contents)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
    try:
        temporary.chmod(target.parent.stat().st_mode & 0o777)
        for name, content in contents.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((root / name).stat().st_mode & 0o777)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if target.is_dir():  # another process was first, with the same content
            return target
        raise
    return target


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        encoded = name.encode(errors="surrogateescape")
        digest.update(b"%d %d\n" % (len(encoded), len(content)) + encoded + content)
    return digest.hexdigest()[:16]
