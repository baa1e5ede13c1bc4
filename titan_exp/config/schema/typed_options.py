"""Options of a component as a typed dataclass, with the violations of those that do not fit."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from titan_exp.config.errors.explain_values import from_pydantic
from titan_exp.config.errors.user_error import UserError, Violation, did_you_mean, listed

Options = TypeVar("Options")


def typed_options(kind: type[Options], values: Mapping[str, Any], key: str) -> Options:
    """Dataclass `kind` with these values, which are at `key` of the configuration.

    Raises:
        UserError: a name or a value does not fit.
    """
    from pydantic import TypeAdapter, ValidationError

    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    found = [
        Violation(
            f"{key}.{name}",
            value,
            "there is no such option",
            did_you_mean(name, names) or (f"it has {listed(names)}" if names else "leave it out"),
        )
        for name, value in values.items()
        if name not in names
    ]
    hints = get_type_hints(kind, include_extras=True)
    try:
        built = TypeAdapter(kind).validate_python({name: value for name, value in values.items() if name in names})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            if detail["type"] == "missing":
                found.append(Violation(f"{key}.{name}", "", "this option has no value", f"+{key}.{name}=VALUE"))
                continue
            found.append(from_pydantic(detail, f"{key}.{name}", hints[name], ""))
        raise UserError("The options cannot be read.", found) from error
    if found:
        raise UserError("The options cannot be read.", found)
    return built
