"""What is wrong with the keys and values of a configuration, in words for whoever typed them."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from annotated_types import Predicate

from titan_exp.config.errors import Violation, shown
from titan_exp.config.experiment import Experiment
from titan_exp.config.schema import (
    annotation_of,
    choices_of,
    hints,
    is_number,
    keys,
    meaning_of,
    optional_fields,
    takes_null,
)
from titan_exp.config.suggest import did_you_mean, listed


def misplaced(values: Mapping[str, Any], kind: Any = Experiment, prefix: str = "") -> Iterator[Violation]:
    """Keys that are unknown or missing, values where a group belongs, and booleans where a number is meant."""
    fields = hints(kind)
    for name in values:
        if name not in fields:
            there = f"{prefix[:-1] or 'the configuration'} has {listed(fields, 'and')}"
            yield Violation(
                f"{prefix}{name}",
                values[name],
                "there is no such key",
                did_you_mean(f"{prefix}{name}", keys()) or there,
            )
    for name, annotation in fields.items():
        field = f"{prefix}{name}"
        if name not in values:
            if name not in optional_fields(kind):
                yield Violation(field, "", "this key has no value", f"give it one: {field}=...")
        elif dataclasses.is_dataclass(annotation):
            if isinstance(values[name], Mapping):
                yield from misplaced(values[name], annotation, f"{field}.")
            else:
                inside = f"{field}.{next(iter(hints(annotation)))}"
                yield Violation(
                    field, values[name], "this is a group of keys, not a value", f"set a key in it: {inside}=..."
                )
        elif isinstance(values[name], bool) and is_number(annotation):
            yield Violation(field, values[name], "a number is meant, not true or false", _about(field))


def in_our_words(error: Mapping[str, Any]) -> Violation:
    """One of pydantic's errors about the value of a key."""
    # The first part of the place is the wrapper's field; numbers in it are places in a list.
    field = ".".join(part for part in error["loc"][1:] if isinstance(part, str))
    value = error["input"]
    reason, remedy = _reason(error["type"], error.get("ctx", {}), field, value, error["msg"])
    return Violation(field, value, reason, remedy or _about(field))


def _reason(kind: str, context: Mapping[str, Any], field: str, value: Any, message: str) -> tuple[str, str]:
    annotation = annotation_of(field)
    match kind:
        case _ if value is None and not takes_null(annotation):
            return "null is not a value of this key", ""
        case "literal_error":
            return _choice(field, value)
        case "greater_than_equal":
            return f"must be at least {context['ge']}", f"the least is {field}={context['ge']}"
        case "less_than_equal":
            return f"must be at most {context['le']}", f"the most is {field}={context['le']}"
        case "greater_than":
            return f"must be above {context['gt']:g}", ""
        case "less_than":
            return f"must be below {context['lt']:g}", ""
        case "predicate_failed":
            tests = [part.func for part in get_args(annotation) if isinstance(part, Predicate)]
            return f"must be {' and '.join((test.__doc__ or test.__name__).rstrip('.') for test in tests)}", ""
        case "int_from_float":
            return "a whole number is meant", f"the nearest is {field}={round(value)}"
        case "int_parsing" | "int_type" | "int_parsing_size":
            return "a whole number is meant", ""
        case "float_parsing" | "float_type":
            return "a number is meant", ""
        case "finite_number":
            return "a finite number is meant", f"write {field}=null" if takes_null(annotation) else ""
        case "bool_parsing" | "bool_type":
            return "true or false is meant", f"{field}=true or {field}=false"
        case "tuple_type":
            return "a list is meant", f"write {field}='[{shown(value)}]'"
        case "too_short" | "too_long":
            return f"{context.get('min_length', context.get('max_length'))} values are meant", ""
        case "dict_type":
            return "keyword arguments are meant", f"add one: +{field}.key=value"
        case "string_type":
            return "text is meant", f"quote it: {field}='\"{shown(value)}\"'"
        case _:
            return message[:1].lower() + message[1:], ""


def _choice(field: str, value: Any) -> tuple[str, str]:
    options = choices_of(annotation_of(field))
    offer = did_you_mean(str(value), options)
    return (
        "there is no such choice",
        f"{offer} The choices are {listed(options, 'and')}." if offer else f"choose {listed(options)}",
    )


def _about(field: str) -> str:
    meaning = meaning_of(field)
    return f"it means: {meaning}" if meaning else f"give {field} another value"
