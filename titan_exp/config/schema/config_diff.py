"""Differences of two configurations, for people."""

from collections.abc import Mapping
from typing import Any

from titan_exp.config.errors.user_error import shown

LISTED = 20
"""Number of keys that are listed."""


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """A line, indented and preceded by a line break, for each key that differs; empty where `old` is not known."""
    if old is None:
        return []
    before, after = flatten(old), flatten(new)
    changed = [
        f"\n  {key}: {_value(before, key)} → {_value(after, key)}"
        for key in after | before
        if key not in before or key not in after or before[key] != after[key]
    ]
    more = len(changed) - LISTED
    return changed if more <= 0 else [*changed[:LISTED], f"\n  and {more} more"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested dictionaries by dotted key; an empty dictionary is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def _value(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else "not there"
