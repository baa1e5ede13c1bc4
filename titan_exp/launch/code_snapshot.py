"""Your code that a configuration names, and the snapshot of all code at submission.

Modules are found by import path in source files, without importing them, so dynamic imports are missed. Snapshots are
content-addressed: later edits do not affect a queued job, and all runs of a sweep share one.
"""

import ast
import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import titan_exp
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.component import locate, search_current_directory
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.launch.git import KNOWN, list_files
from titan_exp.tracking.run_folder.files import mkdir_below
from titan_exp.tracking.run_folder.folder_owner import own_folder

MODULES_LIMIT = 1000


def user_modules(names: Iterable[str]) -> dict[str, Path]:
    """Files by name of the modules at these import paths, their packages, and all modules that they import. Those of
    titan_exp, the standard library and installed packages are left out, unless a name refers to one."""
    search_current_directory()
    found: dict[str, Path] = {}
    waiting = [(name, True) for name in names]
    while waiting and len(found) < MODULES_LIMIT:
        name, named = waiting.pop()
        if not named and _is_package_installed(name.partition(".")[0]):
            continue
        for module, file in _modules(name):
            if module in found or Path(titan_exp.__file__).resolve().parent in file.resolve().parents:
                continue
            found[module] = file
            if not is_installed(file):
                waiting += [(imported, False) for imported in _imports(module, file)]
    return dict(sorted(found.items()))


def is_installed(file: Path) -> bool:
    """True if a file belongs to an installed package or to the Python installation."""
    return not {"site-packages", "dist-packages"}.isdisjoint(file.parts) or not _PYTHON.isdisjoint(file.parents)


def scope(module: str, file: Path) -> Path:
    """Folder of a module's outermost package; the file itself if it is in no package."""
    inner, depth = (file.parent, module.count(".")) if file.stem == "__init__" else (file, module.count("."))
    return inner if depth == 0 else inner.parents[depth - 1]


def _modules(name: str) -> Iterator[tuple[str, Path]]:
    module, _, _ = locate(name)
    parts = module.split(".") if module else []
    for depth in range(len(parts), 0, -1):
        prefix = ".".join(parts[:depth])
        if prefix.partition(".")[0] in sys.stdlib_module_names:
            return
        _, _, spec = locate(prefix)
        if spec is not None and spec.has_location and spec.origin:
            yield prefix, Path(spec.origin).absolute()


def _imports(module: str, file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes()) if file.suffix == ".py" else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return
    package = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            stem = [*package[: len(package) - node.level + 1]] if node.level else []
            base = ".".join([*stem, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names if base)


@functools.cache
def _is_package_installed(package: str) -> bool:
    _, _, spec = locate(package)
    return spec is None or bool(spec.has_location and spec.origin and is_installed(Path(spec.origin).absolute()))


_PYTHON = frozenset(Path(sysconfig.get_path(name)).absolute() for name in ("stdlib", "platstdlib"))
FOLDER = f".code-{os.geteuid()}"
"""Name of the folder of this user's snapshots, beside the runs. Jobs import no code that another user placed there."""
ROOTS = ("titan_exp", "hydra_plugins", "conf")  # snapshot folders of a checkout; an installed package contains `conf`
OWN_LIMIT = 100_000_000  # maximum total size of copied user files, in bytes
NAMES = 3


@dataclass(frozen=True)
class CodeSnapshot:
    """Import folders of a run's code on the ranks."""

    package: str  # copy of titan_exp; first on sys.path
    own: str | None  # copy of the user's repository, replacing the current folder on sys.path; None if not copied
    loose: tuple[str, ...]  # imported files that were not copied: edits take effect until the job starts
    left_out: tuple[str, ...] = ()
    """Files of copied packages that were left out: too large, or ignored by git without a visible import."""

    def notes(self) -> list[str]:
        """Lines for the user about code that is not copied."""
        loose = "lies outside the repository of the current folder, or is too large to copy,"
        loose += " so edits still affect waiting jobs."
        left_out = "is not in the job's copy of your code, because git ignores it or it is too large."
        lines = []
        for names, text in ((self.loose, loose), (self.left_out, left_out)):
            more = f" and {len(names) - NAMES} more, each" if len(names) > NAMES else ""
            lines += [f"{', '.join(names[:NAMES])}{more} {text}"] if names else []
        return lines

    def import_path(self) -> list[str]:
        """sys.path without the Python installation; the copy of your repository replaces the current folder."""
        here, own = os.getcwd(), (sys.prefix, sys.base_prefix)
        places = dict.fromkeys(os.path.abspath(entry) for entry in [*sys.path, here])
        added = [place for place in places if not place.startswith(own)]
        return [self.own if place == here and self.own is not None else place for place in added]


def take_code_snapshot(
    runs: Path, experiments: Sequence[Experiment], package: Path | None = None, *, write: bool = True
) -> CodeSnapshot:
    """Copy titan_exp, and user code that the experiments import, to `runs`; without `write`, only name the copy."""
    ours = package or Path(titan_exp.__file__).resolve().parent
    copy = _keep(runs, ours.parent, _files(ours.parent, ROOTS), write=write)
    here = Path.cwd()
    modules = user_modules(sorted({name for run in experiments for name in import_paths(run).values()}))
    changing = {name: file for name, file in modules.items() if not is_installed(file) and ours not in file.parents}
    mine = {name: file for name, file in changing.items() if here in file.parents}
    files, left_out = _own_files(here, mine) if mine else (None, ())
    kept = {here / name for name in files or ()}
    own = str(_keep(runs, here, files, write=write)) if files else None
    loose = sorted({str(module) for module in changing.values() if module not in kept})
    return CodeSnapshot(str(copy), own, tuple(loose), left_out)


def _own_files(here: Path, modules: Mapping[str, Path]) -> tuple[list[str] | None, tuple[str, ...]]:
    """Files of your code to copy, and files of its packages to leave out; None outside a repository, or if too large.

    Python files of the repository are taken, and all other files that git knows in the packages of imported modules. Of
    ignored files only imported and compiled modules are, since these are generated and others may be private.
    """
    listed = _tracked(here, ["*.py"])
    if listed is None:
        return None, ()
    places = {scope(name, file) for name, file in modules.items()}
    inside = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place])}
    inside |= {*modules.values()}
    found = {file.relative_to(here).as_posix() for file in inside if file.suffix in (".py", ".so")}
    imported = {file.relative_to(here).as_posix() for file in modules.values()}
    code = {*listed, *imported, *(name for name in found if not name.endswith(".py"))}
    others = {*(_tracked(here, [str(place.relative_to(here)) for place in places]) or ())} - code
    room = OWN_LIMIT - sum((here / name).stat().st_size for name in code)
    if room < 0:
        return None, ()
    if sum((here / name).stat().st_size for name in others) > room:
        return sorted(code), tuple(sorted((found | others) - code))
    return sorted(code | others), tuple(sorted(found - code))


def _files(root: Path, names: Sequence[str]) -> list[str]:
    """Files below `root / name`: in a repository the tracked and untracked ones, elsewhere all."""
    found = _tracked(root, [*names]) if _tracked(root, ["titan_exp"], "--cached") else None
    if found is None:
        found = [
            path.relative_to(root).as_posix()
            for name in names
            for path in (root / name).rglob("*")
            # The folder also holds other packages' Hydra plugins.
            if path.is_file() and (name != "hydra_plugins" or "titan_exp_sweeper" in path.parts)
        ]
    return [name for name in found if "__pycache__" not in name.split("/")]


def _tracked(folder: Path, patterns: Sequence[str], *kinds: str) -> list[str] | None:
    names = list_files(folder, patterns, *(kinds or KNOWN))
    return None if names is None else [name for name in names if (folder / name).is_file()]


def _keep(runs: Path, root: Path, names: Sequence[str], *, write: bool) -> Path:
    contents, digest = {name: (root / name).read_bytes() for name in sorted(names)}, hashlib.sha256()
    for name, content in contents.items():
        encoded = name.encode(errors="surrogateescape")
        digest.update(b"%d %d\n" % (len(encoded), len(content)) + encoded + content)
    target = runs / FOLDER / digest.hexdigest()[:16]
    if not write:
        return target
    own_folder(target.parent)
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
            if not _is_owned(target, owner):  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _is_owned(folder: Path, owner: int) -> bool:
    return folder.is_dir() and folder.lstat().st_uid == owner
