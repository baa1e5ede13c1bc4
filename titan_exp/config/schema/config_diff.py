"""Differences of two configurations, for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_exp.config.errors.user_error import shown

LISTED = 20
"""So many keys are listed."""


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """A line, indented and preceded by a line break, for each key that differs; empty where `old` is not known.

    Args:
        old: a configuration as nested dictionaries.
        new: another one.
    """
    if old is None:
        return []
    before, after = dict(_flat(old)), dict(_flat(new))
    changed = [
        f"\n  {key}: {_value(before, key)} → {_value(after, key)}"
        for key in dict.fromkeys((*after, *before))
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]
    more = len(changed) - LISTED
    return changed if more <= 0 else [*changed[:LISTED], f"\n  and {more} more"]


_ABSENT = object()


def _value(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else "not there"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
