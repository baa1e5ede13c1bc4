"""Options of the verbs that compose no run: `key=value` words read into a small dataclass."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from titan_exp.config.errors import UserError, Violation
from titan_exp.config.schema import docstrings
from titan_exp.config.suggest import did_you_mean, listed

Options = TypeVar("Options")


def parse_options(kind: type[Options], arguments: Sequence[str], *, positional: str | None = None) -> Options:
    """Read words into a frozen dataclass whose fields are strings and bounded numbers with defaults.

    Args:
        kind: the dataclass.
        arguments: words as typed, each `key=value`.
        positional: the field that the one word without `=` stands for.

    Raises:
        UserError: with a violation for every word that is no option, or whose value is none.
    """
    from pydantic import TypeAdapter, ValidationError

    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    values: dict[str, str] = {}
    violations: list[Violation] = []
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals and positional is not None and positional not in values:
            key, value = positional, word
        if key in fields:
            values[key] = value
        else:
            remedy = did_you_mean(key, fields) or f"the options are {listed(fields, 'and')}"
            violations.append(Violation(key, value, "there is no such option", remedy))
    built: Any = None
    try:
        built = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            field = str(detail["loc"][0])
            violations.append(
                Violation(field, detail["input"], detail["msg"], f"it means: {docstrings(kind).get(field, '')}")
            )
    if violations:
        raise UserError("The options cannot be read.", violations)
    return built
