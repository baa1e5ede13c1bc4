"""Groups with gaps: reading a value that is refused already raises GapError, so that rules about the others hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn


class GapError(Exception):
    """A value that could not be read was asked for."""


def with_gaps(kind: Any, values: Mapping[str, Any]) -> Any:
    """Instance of a group's dataclass with these values, which `dataclasses.replace` may change; reading any other
    raises GapError."""
    known = {name: one for name, one in kind.__dataclass_fields__.items() if name in values}
    if len(known) == len(dataclasses.fields(kind)):
        return kind(**values)

    def construct(self: Any, **given: Any) -> None:
        vars(self).update(given)

    def refuse(self: Any, name: str = "") -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else GapError

    gaps = {one.name: property(refuse) for one in dataclasses.fields(kind) if one.name not in values}
    members = {
        "__init__": construct,
        "__getattr__": refuse,
        "__dataclass_fields__": known,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), {**members, **gaps})(**values)
