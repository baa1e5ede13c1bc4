"""Type and bound errors: violations for unknown, missing and invalid keys."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from math import isfinite
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Predicate

from titan_exp.config.errors.user_error import Violation, did_you_mean, listed, shown
from titan_exp.config.extension import is_default_of_missing, lacking, shipped_folders
from titan_exp.config.schema import schema
from titan_exp.config.schema.component import one_value


class Unfit(ValueError):
    """Value that a check of a type refuses, with its reason and what to type instead."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclasses.dataclass(frozen=True)
class Read:
    """Metadata of a type: conversion of a value before its type is checked. It may raise Unfit."""

    convert: Callable[[Any], Any]
    """Function of the value as read, which returns the converted one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(self.convert, handler(source))


@dataclasses.dataclass(frozen=True)
class Check:
    """Metadata of a type: check of a value of the type, which raises Unfit."""

    check: Callable[[Any], None]
    """Function of the typed value, which returns if that fits."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_after_validator_function

        return no_info_after_validator_function(lambda value: (self.check(value), value)[1], handler(source))


def unknown_keys(
    values: Mapping[str, Any], fields: Mapping[str, Any], optional: Collection[str], prefix: str = ""
) -> Iterator[Violation]:
    """Violations of unknown and missing keys, values in place of a group, and booleans in place of a number. `fields`
    has the type of each key, `optional` the keys with a default, of the group with this prefix."""
    for name in values:
        if name not in fields and not is_default_of_missing(f"{prefix}{name}", values[name]):
            group = isinstance(values[name], Mapping)
            offer = did_you_mean(f"{prefix}{name}", fields if group else _reachable(prefix, fields))
            known = f"{prefix[:-1] or 'the configuration'} has {listed(fields, 'and')}"
            reason = lacking(f"{prefix}{name}") or "unknown key"
            yield Violation(f"{prefix}{name}", "" if group else values[name], reason, offer or known)
    for name, annotation in fields.items():
        field = f"{prefix}{name}"
        if name not in values:
            if name not in optional:
                group = dataclasses.is_dataclass(annotation)
                reason = "this group is missing" if group else "this key has no value"
                yield Violation(field, "", reason, f"give it {'an option' if group else 'a value'}: {field}=...")
        elif dataclasses.is_dataclass(annotation):
            if isinstance(values[name], Mapping):
                inner, optional_inner = schema.hints(annotation), schema.optional_fields(annotation)
                yield from unknown_keys(values[name], inner, optional_inner, f"{field}.")
            else:
                remedy = f"set a key in it: {field}.{next(iter(schema.hints(annotation)))}=..."
                yield Violation(field, values[name], "this is a group of keys, not a value", remedy)
        elif (kind := schema.group_in_mapping(annotation)) is not None and isinstance(values[name], Mapping):
            groups = dict.fromkeys(values[name], kind)
            yield from unknown_keys(values[name], groups, (), f"{field}.")
        elif isinstance(values[name], bool) and schema.is_number(annotation):
            remedy = about(field, schema.meaning_of(field))
            yield Violation(field, values[name], "must be a number, not true or false", remedy)


def _reachable(prefix: str, fields: Mapping[str, Any]) -> list[str]:
    """Value keys, except those that the group with this prefix has only for other components."""
    return [
        key
        for key in schema.value_keys()
        if not key.startswith(prefix) or key[len(prefix) :].partition(".")[0] in fields
    ]


def from_pydantic(error: Mapping[str, Any], field: str, annotation: Any, meaning: str) -> Violation:
    """Violation of a key's type or bounds, from a pydantic error; of a key in a mapping, whose type is `annotation`."""
    if error["loc"][-1] == "[key]":
        return Violation(field, "", *_choice(error["input"], get_args(annotation)[0]))
    reason, remedy = explained(error, field, annotation)
    return Violation(field, error["input"], reason, remedy or about(field, meaning))


def explained(error: Mapping[str, Any], field: str, annotation: Any) -> tuple[str, str]:
    """Reason of a pydantic error, and what to type instead; empty if that takes an example."""
    kind, value, message = error["type"], error["input"], error["msg"]
    if isinstance(unfit := error.get("ctx", {}).get("error"), Unfit):
        return unfit.reason, unfit.remedy
    if value is None and not schema.takes_null(annotation):
        return "this key cannot be null", ""
    words, several = schema.literals_beside(annotation), isinstance(value, list | tuple)
    several |= kind == "string_type" and isinstance(value, Mapping)
    if value and several and kind in _ONE_VALUE and f"{field}=" not in FREE_TEXT:
        reason = _REASONS.get(kind, ("one run takes one value", ""))[0]
        return reason, one_value(field, list(value), schema.choices_of(annotation))
    if kind == "literal_error" and not words:
        return _choice(value, annotation)
    if kind == "predicate_failed":
        tests = [part.func for part in get_args(annotation) if isinstance(part, Predicate)]
        return f"must be {' and '.join((test.__doc__ or test.__name__).rstrip('.') for test in tests)}", ""
    reason, remedy = _REASONS.get(kind, (message[:1].lower() + message[1:], ""))
    if kind in ("list_type", "tuple_type") and (entries := _entries_that_need_more(annotation)):
        reason, remedy = f"must be a list of {entries}", ""
    rounded = round(value) if isinstance(value, float) and isfinite(value) else value
    if kind in ("int_parsing", "float_parsing") and (number := _with_unit(value, field)):
        remedy = f"write {field}={number}"
    known = {**error.get("ctx", {}), "field": field, "value": shown(value), "rounded": rounded}
    return ", or ".join([reason.format_map(known), *words]), remedy.format_map(known)


def _entries_that_need_more(annotation: Any) -> str:
    """Lists or numbers, which a word in brackets is not; empty for a list of words."""
    entries = [_unbounded(part) for part in get_args(_unbounded(annotation))]
    if any(get_origin(entry) in (list, tuple) for entry in entries):
        return "lists"
    return "numbers" if any(map(schema.is_number, entries)) else ""


def _unbounded(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


FREE_TEXT = ("experiment.notes=",)
"""Overrides whose text has spaces, so that the words after one belong to it."""
_REASONS = {
    "greater_than_equal": ("must be at least {ge:g}", "nearest: {field}={ge:g}"),
    "less_than_equal": ("must be at most {le:g}", "nearest: {field}={le:g}"),
    "greater_than": ("must be above {gt:g}", ""),
    "less_than": ("must be below {lt:g}", ""),
    "int_from_float": ("must be a whole number", "nearest: {field}={rounded}"),
    "int_parsing": ("must be a whole number", ""),
    "int_type": ("must be a whole number", ""),
    "float_parsing": ("must be a number", ""),
    "float_type": ("must be a number", ""),
    "finite_number": ("must be a finite number", ""),
    "bool_parsing": ("must be true or false", "write {field}=true or {field}=false"),
    "bool_type": ("must be true or false", "write {field}=true or {field}=false"),
    "tuple_type": ("must be a list", "write {field}='[{value}]'"),
    "list_type": ("must be a list", "write {field}='[{value}]'"),
    "too_short": ("needs {min_length} values", ""),
    "too_long": ("takes only {max_length} values", ""),
    "dataclass_type": ("must be keys with values", ""),
    "dict_type": ("must be arguments by name", "add one: +{field}.key=value"),
    "string_type": ("must be text", "quote it: {field}='\"{value}\"'"),
}
"""Reason and remedy by pydantic error type; an empty remedy is replaced by an example and the key's meaning."""
_ONE_VALUE = ("int_type", "float_type", "bool_type", "string_type", "literal_error")
"""Errors of a list where one value is asked for."""


def _with_unit(value: Any, field: str) -> str:
    """Number that was written with a unit, as in 4k, 8K, 1.5B or, of a key `steps`, 100 steps; else empty."""
    found = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)\s*([a-zA-Z]+)", str(value).strip())
    unit = found[2].lower() if found else ""
    if found is None or (unit not in _UNITS and unit != field.rpartition(".")[2]):
        return ""
    number = float(found[1].replace("_", "")) * _UNITS.get(unit, 1)
    text = f"{number:.0f}" if number == int(number) and number < 1e9 else f"{number:g}"
    return f"{text} (or {round(number * 1.024)})" if unit == "k" else text


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def _choice(value: Any, annotation: Any) -> tuple[str, str]:
    options = [shown(option) for option in schema.choices_of(annotation) if option != ""]
    offer = did_you_mean(str(value), options)
    remedy = f"{offer} The choices are {listed(options, 'and')}." if offer else f"choose {listed(options)}"
    return "unknown choice", remedy


def about(field: str, meaning: str) -> str:
    """Example of a key, from the comments of the shipped YAML or its docstring, and its meaning."""
    means = f"it means: {meaning}" if meaning else f"give {field} another value"
    example = _examples().get(field) or schema.example_of(field)
    return f"for example {example} ({means.rstrip('.')})" if example else means


@cache
def _examples() -> dict[str, str]:
    """First override in the comments of the shipped options for each key, and for the mapping that it adds one to."""
    found: dict[str, str] = {}
    for path in (path for folder in shipped_folders() for path in sorted(folder.rglob("*.yaml"))):
        for comment in re.findall("#(.*)", path.read_text(encoding="utf-8")):
            for text, key in re.findall(r"(?<![\w./])(\+?([a-z_]+(?:\.\w+)+)=(?:'[^']*'|[^\s,;)]+))", comment):
                found.setdefault(key.rpartition(".")[0] if text.startswith("+") else key, text)
    return found
