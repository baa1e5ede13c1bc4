"""Configuration diff for messages."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_error import shown

LISTED = 20
"""Maximum number of listed keys."""


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Lines for the keys that differ, indented and preceded by a line break; empty if `old` is unknown. A key that an
    older version lacks does not differ if it is empty."""
    if old is None:
        return []
    before, after = flatten(old), flatten(new)
    changed = [
        f"\n  {key}: {_value(before, key)} → {_value(after, key)}"
        for key in after | before
        if key not in after or (before[key] != after[key] if key in before else after[key] not in ({}, [], ()))
    ]
    more = len(changed) - LISTED
    return changed if more <= 0 else [*changed[:LISTED], f"\n  and {more} more"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to dotted keys; an empty dictionary is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def same_value(value: Any, other: Any) -> bool:
    """True if two values of a configuration are the same: 1 and 1.0, a number and its text, not 1 and true."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other or (isinstance(value, str) != isinstance(other, str) and str(value) == str(other))


def _value(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else "not there"
