"""Run id and experiment id: hashes of the resolved configuration, without keys that do not affect the run.

Keys at their dataclass default are left out, so a new key with a default changes no id, and so are keys that other keys
leave without effect. Repeating a command finds the same folder, and repeating a sweep starts only missing runs.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.identity_keys import LAYOUT, has_effect, idle_keys, is_among
from titan_exp.config.schema.schema import group_in_mapping, hints

ID_LENGTH = 12
"""Hex digits of an id (48 bits): collision probability 0.2 % for a million runs."""


def run_id(experiment: Experiment) -> str:
    """Hash of all effective keys, including the resolved layout. Raises UserError if a value has no canonical JSON."""
    return _digest(identity(experiment))


def experiment_id(experiment: Experiment) -> str:
    """Hash of all effective keys except the layout. Raises UserError if a value has no canonical JSON."""
    return _digest({key: value for key, value in identity(experiment).items() if not is_among(key, LAYOUT)})


def identity(experiment: Experiment) -> dict[str, Any]:
    """Values hashed into the run id, by dotted key: effective keys that are not at their default."""
    fields = list(_fields(experiment))
    idle = idle_keys({key: value for key, value, _ in fields})
    return {
        key: value for key, value, default in fields if value != default and has_effect(key) and not is_among(key, idle)
    }


def canonical(value: object, key: str = "") -> str:
    """Canonical JSON: sorted keys, no spaces, floats by `repr`. Raises UserError about `key` for other types."""
    _require_stable(value, key)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(values: dict[str, Any]) -> str:
    text = "{" + ",".join(f"{json.dumps(key)}:{canonical(values[key], key)}" for key in sorted(values)) + "}"
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _fields(group: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, value and dataclass default of a group's keys, recursively."""
    for field in dataclasses.fields(group):
        value, key = getattr(group, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{key}.")
        elif field.name in getattr(group, "in_run_id", ()):
            yield key, value, dataclasses.MISSING
        elif group_in_mapping(hints(type(group)).get(field.name)) is not None:
            yield key, {name: _nondefault(part) for name, part in value.items()}, {}
        else:
            yield key, value, field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _nondefault(group: Any) -> dict[str, Any]:
    return {name: value for name, value, default in _fields(group) if value != default}


def _require_stable(value: object, key: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f"{key}: the key {name!r} is not text, so the run has no stable name. Quote the key.")
            _require_stable(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: a run cannot be named by a number that is not finite. Use a finite one.")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise UserError(
            f"{key}={value!r}: a {type(value).__name__} has no stable text to name the run by. "
            "Use text, numbers, true, false, null, lists and mappings."
        )
