"""Provenance of runs: versions and diffs of titan_exp and of the user's code, environment. Read once per launch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.launch.provenance.code_snapshot import CodeSnapshot, is_installed, scope, user_modules
from titan_exp.launch.provenance.environment import read_environment
from titan_exp.launch.provenance.git import read_code_version, read_files, read_repository, repository_of
from titan_exp.tracking.run_folder.provenance_records import CodeRecord, CodeVersion

PART = "# code of "
"""Begin of the line before each part of diff.patch; git apply skips such lines."""


@dataclass(frozen=True)
class Provenance:
    """Provenance shared by the runs of one launch; the user's code is read per set of import paths."""

    code: CodeVersion
    diff: str
    environment: dict[str, Any]
    frozen: CodeSnapshot | None = None
    """Code snapshot; None if ranks import the code in place."""
    _imported: dict[tuple[str, ...], list[tuple[CodeVersion, str]]] = field(default_factory=dict)

    def imported(self, experiment: Experiment) -> list[tuple[CodeVersion, str]]:
        """Versions and diffs of the user's code that a configuration names, by name."""
        names = tuple(sorted(set(import_paths(experiment).values())))
        if names not in self._imported:
            self._imported[names] = _read_user_code(names, self.code)
        return self._imported[names]

    def code_record(self, experiment: Experiment, **ids: str) -> CodeRecord:
        """Versions of titan_exp and of the user's code, with ids of the run."""
        imported = [version for version, _ in self.imported(experiment)]
        frozen = None if self.frozen is None else asdict(self.frozen)
        return CodeRecord((self.code, *imported), import_paths(experiment), frozen, **ids)

    def patch(self, experiment: Experiment) -> str:
        """Content of diff.patch: a part per repository, each after a line that names it."""
        parts = [(self.code, self.diff), *self.imported(experiment)]
        return "".join(f"{_heading(version)}\n{diff}" for version, diff in parts if diff)


def read_provenance(frozen: CodeSnapshot | None = None) -> Provenance:
    """Read the current version and diff of titan_exp, and the environment."""
    code, diff = read_code_version()
    return Provenance(code, diff, read_environment(), frozen)


def _heading(version: CodeVersion) -> str:
    base = "in no repository" if version.diff is None else f"from commit {version.commit or 'none'}"
    return f"{PART}{version.name}: {version.path}, {base}"


def _read_user_code(names: Sequence[str], own: CodeVersion) -> list[tuple[CodeVersion, str]]:
    """Version and diff of every repository, installed package and folder that user code is in."""
    scopes: dict[tuple[str, Path], dict[Path, None]] = {}
    repositories: dict[Path, Path | None] = {}
    for module, file in user_modules(names).items():
        code = scope(module, file)
        if is_installed(file):
            key = ("installed", Path(module.partition(".")[0]))
        else:
            top = repositories.setdefault(code, repository_of(code)) if code not in repositories else repositories[code]
            key = ("files", code.parent) if top is None else ("repository", top)
        scopes.setdefault(key, {})[code] = None
    found, short = [], [own.name, *(place.name for _, place in scopes)]
    for (kind, place), folders in scopes.items():
        name = place.name if short.count(place.name) == 1 else str(place)
        if kind == "installed":
            found.append(_installed(place.name, list(folders)))
        elif kind == "files":
            found.append(read_files(name, place, list(folders), save=True))
        else:
            version, diff = read_repository(name, place, list(folders))
            # The diff of titan_exp's repository is there already, with untracked files.
            found.append((version, "" if own.commit is not None and str(place) == own.path else diff))
    return sorted(found, key=lambda part: part[0].name)


def _installed(package: str, folders: Sequence[Path]) -> tuple[CodeVersion, str]:
    """Version of an installed package, with checksums, since a version may be installed again with other content."""
    distributions = metadata.packages_distributions().get(package, [])
    version = metadata.version(distributions[0]) if distributions else None
    return read_files(distributions[0] if distributions else package, folders[0].parent, folders, version=version)
