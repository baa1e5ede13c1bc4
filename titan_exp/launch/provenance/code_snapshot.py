"""Code snapshot at submission, so that later edits do not affect a queued job.

Snapshots are content-addressed: all runs of a sweep share one.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import titan_exp
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.import_path import find_module
from titan_exp.config.schema.import_path_keys import import_paths
from titan_exp.launch.provenance.git import run_git
from titan_exp.launch.provenance.user_modules import is_installed
from titan_exp.tracking.run_folder.atomic_write import mkdir_below
from titan_exp.tracking.run_folder.folder_owner import own_folder

FOLDER = f".code-{os.geteuid()}"
"""Folder of this user's snapshots, beside the runs: jobs import no code that another user has placed there."""
ROOTS = ("titan_exp", "hydra_plugins", "conf")
"""Snapshot folders of a checkout; an installed package contains `conf`."""
OWN_LIMIT = 10_000_000
"""Maximum total bytes of the user repository's Python files; a larger repository is not copied."""


@dataclass(frozen=True)
class CodeSnapshot:
    """Import folders of a run's code on the ranks."""

    package: str
    """Copy of titan_exp; first on sys.path."""
    own: str | None
    """Copy of the user's repository, replacing the current folder on sys.path; None if not copied."""
    loose: tuple[str, ...]
    """Imported files that were not copied: edits take effect until the job starts."""


def take_code_snapshot(runs: Path, experiments: Sequence[Experiment], package: Path | None = None) -> CodeSnapshot:
    """Copy titan_exp, and user code that the experiments import, to `runs` unless the same copy exists."""
    ours = package or Path(titan_exp.__file__).resolve().parent
    copy = _keep(runs, ours.parent, _files(ours.parent, ROOTS))
    here = Path.cwd()
    names = sorted({name for run in experiments for name in import_paths(run).values()})
    modules = [module for module in map(find_module, names) if module is not None]
    changing = [module for module in modules if not is_installed(module) and ours not in module.parents]
    mine = [module for module in changing if here in module.parents]
    files = _tracked(here, ["*.py"]) if mine else None
    if files is not None and sum((here / name).stat().st_size for name in files) > OWN_LIMIT:
        files = None
    kept = {here / name for name in files or ()}
    own = str(_keep(runs, here, files)) if files and any(module in kept for module in mine) else None
    loose = sorted({str(module) for module in changing if own is None or module not in kept})
    return CodeSnapshot(str(copy), own, tuple(loose))


def _files(root: Path, names: Sequence[str]) -> list[str]:
    """Files below `root / name`: tracked and untracked ones in a repository, else all."""
    found = _tracked(root, [*names]) if _tracked(root, ["titan_exp"], others=False) else None
    if found is None:
        found = [
            path.relative_to(root).as_posix()
            for name in names
            for path in (root / name).rglob("*")
            # The folder also holds other packages' Hydra plugins.
            if path.is_file() and (name != "hydra_plugins" or "titan_exp_sweeper" in path.parts)
        ]
    return [name for name in found if "__pycache__" not in name.split("/")]


def _tracked(folder: Path, patterns: Sequence[str], *, others: bool = True) -> list[str] | None:
    """Tracked files that match, with `others` untracked ones too; None outside a repository."""
    kinds = ["--cached", "--others", "--exclude-standard"] if others else ["--cached"]
    listed = run_git(folder, "ls-files", "-z", *kinds, "--", *patterns)
    # The index also lists deleted files.
    return None if listed is None else sorted({name for name in listed.split("\0") if (folder / name).is_file()})


def _keep(runs: Path, root: Path, names: Sequence[str]) -> Path:
    """Copy files to a content-addressed folder, published by a rename."""
    contents = {name: (root / name).read_bytes() for name in sorted(names)}
    target = own_folder(runs / FOLDER) / _digest(contents)
    temporary = target.with_name(f".new-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(0o755)
    try:
        owner = temporary.stat().st_uid  # this user, as the file system names users
        if _is_owned(target, owner):
            return target
        if target.exists():
            target = target.with_name(f"{target.name}{temporary.name.removeprefix('.new')}")
        for name, content in contents.items():
            path = temporary / name
            mkdir_below(temporary, path.parent, mode=0o755)
            path.write_bytes(content)
            mode = path.stat().st_mode & 0o755
            path.chmod(mode | (root / name).stat().st_mode & mode >> 2 & 0o111)  # to those who may read it
        try:
            os.rename(temporary, target)
        except OSError:
            if not _is_owned(target, owner):  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _is_owned(folder: Path, owner: int) -> bool:
    return folder.is_dir() and folder.lstat().st_uid == owner


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in contents.items():
        encoded = name.encode(errors="surrogateescape")
        digest.update(b"%d %d\n" % (len(encoded), len(content)) + encoded + content)
    return digest.hexdigest()[:16]
