"""The dataclasses read as a schema: which keys there are, of which type, and what each of them means."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from titan_exp.config.groups.experiment import Experiment


def keys(kind: Any = Experiment, prefix: str = "") -> Iterator[str]:
    """Every key of the configuration, dotted: the groups, and the values in them."""
    for name, annotation in hints(kind).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(annotation):
            yield from keys(annotation, f"{prefix}{name}.")


def value_keys() -> list[str]:
    """Every key that takes a value, dotted: the keys less the groups."""
    return [key for key in keys() if not dataclasses.is_dataclass(annotation_of(key))]


def annotation_of(key: str) -> Any:
    """The type of a key, with its bounds; None where there is no such key."""
    found: Any = Experiment
    for part in key.split("."):
        found = hints(found).get(part) if dataclasses.is_dataclass(found) else None
    return found


def meaning_of(key: str) -> str:
    """The docstring below a field, on one line; empty where there is no such key."""
    group, _, name = key.rpartition(".")
    kind = annotation_of(group) if group else Experiment
    return docstrings(kind).get(name, "") if dataclasses.is_dataclass(kind) else ""


@cache
def docstrings(kind: Any) -> dict[str, str]:
    """The docstring below each field of a dataclass, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]  # a class
    found = {}
    for before, after in pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[before.target.id] = " ".join(text.split())
    return found


@cache
def hints(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass with their types, bounds included."""
    return typing.get_type_hints(kind, include_extras=True)


def optional_fields(kind: Any) -> set[str]:
    """The fields of a dataclass that have a default."""
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }


def is_number(annotation: Any) -> bool:
    """Whether a type is a number or None, and nothing that a boolean could stand for."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return is_number(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return all(is_number(part) for part in typing.get_args(annotation) if part is not types.NoneType)
    return annotation in (int, float)


def takes_null(annotation: Any) -> bool:
    """Whether null is a value of this type."""
    return types.NoneType in typing.get_args(annotation)


def choices_of(annotation: Any) -> list[str]:
    """The words that a type, or a list's every entry, allows; empty where it allows others."""
    if typing.get_origin(annotation) is list:
        return choices_of(typing.get_args(annotation)[0])
    return list(typing.get_args(annotation)) if typing.get_origin(annotation) is typing.Literal else []
