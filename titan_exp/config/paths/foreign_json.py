"""JSON objects in files of a repository, a checkpoint or a store, which others wrote: bounded in size and depth."""

from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.paths import foreign_file


def read_object(path: Path) -> dict[str, Any]:
    """Object in a JSON file.

    Raises:
        UserError: the file cannot be read, or holds anything else, or is too large or too deeply nested.
    """
    try:
        return parse_object(foreign_file.read_file(path), str(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from error


def parse_object(content: bytes | str, name: str) -> dict[str, Any]:
    """Object in JSON text; `name` names it in the UserError about anything else."""
    values = parse_json(content, name)
    if not isinstance(values, dict):
        raise UserError(f"{name} cannot be read: it holds {_kind(values)} instead of keys and values. It is damaged.")
    return values


def parse_json(content: bytes | str, name: str) -> Any:
    """Value in JSON text; `name` names it in the UserError about text that is none, or is too deeply nested."""
    try:
        return foreign_file.parse_json(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be read as JSON ({error}). It is damaged.") from error


def _kind(value: object) -> str:
    names = {dict: "keys", list: "a list", str: "a text", bool: "a switch", int: "a number", float: "a number"}
    return names.get(type(value), "nothing")


def count(value: object, name: str, most: int = 2**63 - 1) -> int:
    """A whole number from 0 to `most`. Raises UserError that names anything else."""
    if type(value) is not int or not 0 <= value <= most:
        raise UserError(f"{name} is {shown(value)[:60]}, and not a whole number from 0 to {most:,}.")
    return value


def table(value: object, name: str) -> dict[str, Any]:
    """Keys and values. Raises UserError that names anything else."""
    if not isinstance(value, dict):
        raise UserError(f"{name} is {_kind(value)} instead of keys and values.")
    return value


def text(value: object, name: str) -> str:
    """A text. Raises UserError that names anything else."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {_kind(value)} instead of a text.")
    return value


def items(value: object, name: str) -> list[Any]:
    """A list. Raises UserError that names anything else."""
    if not isinstance(value, list):
        raise UserError(f"{name} is {_kind(value)} instead of a list.")
    return value


def digests(value: object, name: str) -> dict[str, str]:
    """Texts by name. Raises UserError that names anything else."""
    return {key: text(one, f"{name}: {key}") for key, one in table(value, name).items()}


def file_name(value: object, name: str) -> str:
    """Name of a file in its folder. Raises UserError that names anything else, a path that leads out of it too."""
    found = text(value, name)
    if not found or Path(found).is_absolute() or ".." in Path(found).parts:
        raise UserError(f"{name} is {found[:60]!r}, and no name of a file in its folder.")
    return found
