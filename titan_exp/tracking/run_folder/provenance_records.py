"""Provenance records of a run: its overrides, its code, and the run that it continues."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from yaml import YAMLError

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import load_node, of_kind, read_file, read_text
from titan_exp.tracking.run_folder.attempts import read_json
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, read_metrics


def overrides_text(overrides: Sequence[str]) -> str:
    """Content of an overrides file."""
    return "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides) or "[]\n"


def read_overrides(path: Path) -> tuple[str, ...] | None:
    """Overrides in a file; None if the file is missing or not an overrides file."""
    try:
        _, lines = load_node(read_text(path))
        return of_kind(tuple[str, ...], lines)
    except (OSError, ValueError, YAMLError, UserError):
        return None


def for_shell(override: str) -> str:
    """Override as typed in a shell; in double quotes if its value has single quotes."""
    return f'"{override}"' if "'" in override and not re.search(r'["$`\\!\n]', override) else shlex.quote(override)


@dataclass(frozen=True)
class CodePart:
    """titan_exp, or a part of your code: a repository, an installed package, or loose files."""

    name: str
    """Name of the package or repository; unique in a run."""
    version: str | None = None
    """Version of the installed package."""
    commit: str | None = None
    """Full hash of HEAD; None without a repository."""
    branch: str | None = None
    """Branch; None if HEAD is detached."""
    dirty: bool | None = None
    """True if the working tree differs from the commit, including untracked files that may be code."""

    @property
    def state(self) -> str:
        """Commit of a repository, or version of a package, as text."""
        if self.commit:
            return f"commit {self.commit[:10]}{' with uncommitted changes' if self.dirty else ''}"
        return f"version {self.version}" if self.version else "no commit"

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f' ({self.branch})' if self.branch else ''}"


@dataclass(frozen=True)
class CodeVersion(CodePart):
    """Part of a run's code, with the data that determine its content."""

    path: str | None = None
    """Top folder of the repository; without one, the folder that holds the package or the files."""
    remote: str | None = None
    """URL of the remote `origin`, without credentials."""
    left_out: tuple[str, ...] = ()
    """Untracked files too large for the diff, and nested repositories."""
    masked: bool = False
    """True if credentials were masked in the diff, so that it cannot be applied."""
    diff: str | None = None
    """Checksum of the diff before masking; None if there is no diff."""
    files: dict[str, str] = field(default_factory=dict)
    """Checksums of the code's files, by name relative to `path`; empty if there are too many."""


@dataclass(frozen=True)
class CodeRecord:
    """Content of `code.json`: code of a run, and its ids."""

    parts: tuple[CodeVersion, ...]
    """titan_exp, then your repositories and packages."""
    import_paths: Mapping[str, str] = field(default_factory=dict)
    """Names of your code, by configuration key."""
    frozen: Mapping[str, Any] | None = None
    """Import folders of the code snapshot; None if ranks import the code in place."""
    run_id: str | None = None
    experiment_id: str | None = None

    @property
    def dirty(self) -> bool | None:
        """True if a part differs from its commit; None if that is unknown."""
        return any(part.dirty for part in self.parts[1:]) or self.parts[0].dirty

    def to_json(self) -> str:
        """Text of `code.json`, where titan_exp's fields are not nested."""
        own, *imported = map(asdict, self.parts)
        frozen = {} if self.frozen is None else {"frozen": self.frozen}
        users = {"import_paths": self.import_paths, "imported": imported} if imported else {}
        ids = {"run_id": self.run_id, "experiment_id": self.experiment_id}
        return json.dumps({**ids, **own, **frozen, **users}, indent=1) + "\n"


def code_record(values: Mapping[str, Any]) -> CodeRecord:
    """Code record from the object in `code.json`, also of other versions of titan_exp. Raises ValueError if a value has
    another type."""
    parts = [{**values, "name": "titan_exp"}, *of_kind(list[dict], values.get("imported") or [])]
    return of_kind(CodeRecord, _known(CodeRecord, {**values, "parts": [_known(CodeVersion, part) for part in parts]}))


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if values.get(each.name) is not None}


class EnvironmentRecord(TypedDict, total=False):
    """Content of `env.json`."""

    cpu: str | None
    cores: int | None
    cores_usable: int | None
    gpus: list[dict[str, Any]] | None
    packages: dict[str, Any] | None
    environment: dict[str, Any] | None


def read_code(path: Path) -> CodeRecord | None:
    """Code record of a run; None if missing. Raises UserError if it is damaged."""

    def made(values: dict[str, Any]) -> CodeRecord:
        patch = b""
        if "diff" not in values:  # older versions recorded no checksum of the diff
            with suppress(FileNotFoundError):
                patch = read_file(path.with_name("diff.patch"))
        return code_record({"diff": digest(patch) if patch else None, **values})

    return read_json(path, made=made)


def digest(content: bytes) -> str:
    """Checksum of a file or diff in `code.json`."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def read_environment_record(path: Path) -> dict[str, Any] | None:
    """Environment of a run; None if missing. Raises UserError if it is damaged."""
    return read_json(path, EnvironmentRecord)  # type: ignore[return-value]


LINEAGE_FILE = "lineage.json"
"""File name in the run folder."""


@dataclass(frozen=True)
class Lineage:
    """Parent of a run."""

    parent: str
    """Run folder or URL."""
    step: int
    """Step of the parent's checkpoint."""
    tokens: int
    """Tokens that the parent had trained on."""

    @staticmethod
    def read(run_folder: Path) -> "Lineage | None":
        """Lineage of a run; None if it was not continued from another. Raises UserError if the file is damaged."""
        return read_json(run_folder / LINEAGE_FILE, Lineage)

    def write(self, run_folder: Path) -> None:
        """Write the file of a run."""
        write_atomically(run_folder / LINEAGE_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @property
    def name(self) -> str:
        """NAME/ID of the parent, or its URL."""
        return self.parent if "://" in self.parent else "/".join(Path(self.parent).parts[-2:])

    def parent_folder(self, run_folder: Path) -> Path | None:
        """Run folder of the parent, even if both were moved together; None if it is not on this machine."""
        moved = run_folder.absolute().parents[1].joinpath(*Path(self.parent).parts[-2:])
        return next((path for path in (Path(self.parent), moved) if path.is_dir()), None)

    def __str__(self) -> str:
        return f"{self.name} after step {self.step}"


@dataclass(frozen=True)
class Ancestor:
    """Run that another run continues, directly or not."""

    lineage: Lineage
    """Lineage record of its child, which names this run."""
    folder: Path | None
    """Run folder; None if it is not on this machine."""


def ancestors(run_folder: Path) -> Iterator[Ancestor]:
    """Parent of a run, the parent's parent, and so on to the last one on this machine."""
    folder, seen = run_folder, {run_folder.resolve()}
    while (lineage := Lineage.read(folder)) is not None:
        parent = lineage.parent_folder(folder)
        if parent is not None and parent.resolve() in seen:
            return
        yield Ancestor(lineage, parent)
        if parent is None:
            return
        seen.add(parent.resolve())
        folder = parent


def children(run_folder: Path) -> list[tuple[Path, Lineage]]:
    """Run folders beside a run, in any group, that were continued from it."""
    found = []
    for path in sorted(run_folder.absolute().parents[1].glob(f"*/[!.]*/{LINEAGE_FILE}")):
        with suppress(UserError, OSError):  # damaged (`show` of that run explains it), or closed to this user
            lineage = Lineage.read(path.parent)
            parent = None if lineage is None else lineage.parent_folder(path.parent)
            if lineage is not None and parent is not None and parent.resolve() == run_folder.resolve():
                found.append((path.parent, lineage))
    return found


def read_history(run_folder: Path, file: str = "metrics.jsonl") -> MetricRows:
    """Rows of a run's metrics, preceded by its ancestors' rows up to the steps at which they were continued.

    `file` may be another file of such rows. A parent that is not on this machine has no rows. Raises UserError if a row
    is damaged.
    """
    rows = read_metrics(run_folder / file)
    for ancestor in ancestors(run_folder):
        if ancestor.folder is not None:
            step = ancestor.lineage.step
            earlier = read_metrics(ancestor.folder / file)
            rows = MetricRows(chain((row for row in earlier if row["step"] <= step), rows))
    return rows
