"""Records of a run's code (`code.json`) and environment (`env.json`), as far as they are read again."""

from pathlib import Path
from typing import Any, TypedDict

from titan_exp.tracking.run_folder.state import read_json


class CodePart(TypedDict, total=False):
    """Version of titan_exp, or of a repository or package of the user's."""

    version: str | None
    commit: str | None
    branch: str | None
    dirty: bool | None
    path: str | None
    diff: str | None
    files: dict[str, str] | None


class NamedPart(CodePart):
    """Version of a part of the user's code."""

    name: str


class Frozen(TypedDict, total=False):
    """Import folders of a code snapshot."""

    own: str | None


class CodeRecord(CodePart, total=False):
    """Content of `code.json`: ids of the run, the version of titan_exp, and those of the user's code."""

    run_id: str | None
    experiment_id: str | None
    frozen: Frozen | None
    imported: list[NamedPart]


class EnvironmentRecord(TypedDict, total=False):
    """Content of `env.json`."""

    cpu: str | None
    cores: int | None
    cores_usable: int | None
    gpus: list[dict[str, Any]] | None
    packages: dict[str, Any] | None
    environment: dict[str, Any] | None


def read_code(path: Path) -> dict[str, Any] | None:
    """Code record of a run; None if missing. Raises UserError if it is damaged."""
    return read_json(path, CodeRecord)  # type: ignore[return-value]


def read_environment_record(path: Path) -> dict[str, Any] | None:
    """Environment of a run; None if missing. Raises UserError if it is damaged."""
    return read_json(path, EnvironmentRecord)  # type: ignore[return-value]
