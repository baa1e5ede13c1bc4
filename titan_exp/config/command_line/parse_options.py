"""Options of the verbs that compose no run: `key=value` words read into a small dataclass."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

from titan_exp.config.errors.did_you_mean import did_you_mean, listed
from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.schema.schema import docstrings

Options = TypeVar("Options")


HELP = ("--help", "-h", "help")
"""Words that ask what a verb takes."""


def options_help(usage: str, kind: type) -> str:
    """Help of a verb: its usage, and every option with default and meaning."""
    lines = [usage, ""]
    said = docstrings(kind)
    for field in dataclasses.fields(kind):
        default = "" if field.default == "" else shown(field.default)
        lines.append(f"  {field.name}={default}")
        meaning = " ".join(said.get(field.name, "").split())
        lines += textwrap.wrap(meaning, 112, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


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
