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
from titan_exp.config.schema.component import config_classes


def keys() -> Iterator[str]:
    """Every key of the configuration, dotted: the groups, and the values in them."""
    found: dict[str, None] = {}
    for group in hints(Experiment):
        found[group] = None
        for kind in config_classes(group):
            found |= dict.fromkeys(_keys_in(kind, f"{group}."))
    yield from found


def _keys_in(kind: Any, prefix: str) -> Iterator[str]:
    for name, annotation in hints(kind).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(annotation):
            yield from _keys_in(annotation, f"{prefix}{name}.")


def value_keys() -> list[str]:
    """Every key that takes a value, dotted: the keys less the groups."""
    return [key for key in keys() if not dataclasses.is_dataclass(annotation_of(key))]


def annotation_of(key: str) -> Any:
    """The type of a key, with its bounds; None where there is no such key."""
    group, _, below = key.rpartition(".")
    found = (hints(kind).get(below) for kind in _dataclasses_of(group))
    return next((annotation for annotation in found if annotation is not None), None)


def meaning_of(key: str) -> str:
    """The docstring below a field, on one line; empty where there is no such key."""
    group, _, below = key.rpartition(".")
    found = (docstrings(kind).get(below, "") for kind in _dataclasses_of(group))
    return next(filter(None, found), "")


def _dataclasses_of(group: str) -> Iterator[Any]:
    """Dataclasses that may type a group, dotted where it is inside of another one; the whole for an empty name."""
    if not group:
        yield Experiment
    elif "." not in group:
        yield from config_classes(group) if group in hints(Experiment) else ()
    else:
        parent, _, below = group.rpartition(".")
        for kind in _dataclasses_of(parent):
            annotation = hints(kind).get(below)
            if dataclasses.is_dataclass(annotation):
                yield annotation


@cache
def docstrings(kind: Any) -> dict[str, str]:
    """The docstring below each field of a dataclass and its base classes, read from their source."""
    found = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_docstrings(base)
    return found


def _own_docstrings(kind: Any) -> dict[str, str]:
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
    """True if a type is a number or None, so that a boolean is a mistake."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return is_number(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return all(is_number(part) for part in typing.get_args(annotation) if part is not types.NoneType)
    return annotation in (int, float)


def takes_switch(annotation: Any) -> bool:
    """True if true and false are values of this type."""
    return annotation is bool or bool in typing.get_args(annotation)


def takes_null(annotation: Any) -> bool:
    """True if null is a value of this type."""
    return types.NoneType in typing.get_args(annotation)


def choices_of(annotation: Any) -> list[str]:
    """The words that a type, or a list's every entry, allows; empty where it allows others."""
    if typing.get_origin(annotation) is list:
        return choices_of(typing.get_args(annotation)[0])
    return list(typing.get_args(annotation)) if typing.get_origin(annotation) is typing.Literal else []
