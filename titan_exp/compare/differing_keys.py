"""Configuration diff: keys whose resolved values differ between runs."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_exp.config.errors.user_error import shown
from titan_exp.config.schema.config_diff import flatten
from titan_exp.config.schema.identity_keys import has_effect

SEED = "experiment.seed"
"""Runs that differ only in this key are repetitions."""

LABEL_OF_MODEL = "model.name"
"""Label key that replaces the model's shape keys if equal names mean equal shapes."""

GENERIC = {"name", "mode", "enabled", "recipe", "loss"}
"""Generic key names; the short name is the group's instead."""

ABSENT = "not there"
"""Value of a key missing from a configuration, written by an older version or read from W&B."""


@dataclass(frozen=True)
class DifferingKeys:
    """Keys that distinguish runs."""

    keys: tuple[str, ...]
    """Full names of the columns, in the order of the configuration."""
    short: Mapping[str, str]
    """Unique short name of each key."""
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys folded into a column that determines them, by column."""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All differing keys, including folded ones."""
        return tuple(key for column in self.keys for key in (self.stands_for.get(column) or (column,)))

    def label(self, values: Mapping[str, Any], keys: Iterable[str] | None = None) -> str:
        """Short names and values of all or some keys: `lr=0.003 tp=2`."""
        return " ".join(
            f"{self.short[key]}={value_text(values.get(key))}" for key in (self.keys if keys is None else keys)
        )


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> DifferingKeys:
    """Keys in which nested configurations differ, without the seed and keys that do not affect results."""
    flat = [flatten(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for values in flat for key in values)
        if key != SEED and has_effect(key) and len({_hashable(values.get(key, ABSENT)) for values in flat}) > 1
    ]
    keys, stands_for = _fold_model(keys, flat)
    return DifferingKeys(tuple(keys), _short_names(keys), stands_for)


def value_text(value: Any) -> str:
    """Format a value as typed on the command line, numbers to ten digits."""
    return f"{value:.10g}" if isinstance(value, float) else shown(value)


def _fold_model(keys: list[str], flat: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Fold three or more keys of a model's shape into one column `model.name` if equal names mean equal shapes."""
    shape = tuple(key for key in keys if key.startswith("model."))
    names = [values.get(LABEL_OF_MODEL) for values in flat]
    shapes = [tuple(_hashable(values.get(key, ABSENT)) for key in shape) for values in flat]
    if len(shape) < 3 or None in names or len(set(zip(names, shapes, strict=True))) != len(set(names)):
        return keys, {}
    first = keys.index(shape[0])
    return [*keys[:first], LABEL_OF_MODEL, *(key for key in keys[first:] if key not in shape)], {LABEL_OF_MODEL: shape}


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    wanted = {key: _shortest(key) for key in keys}
    while clashes := [name for name, count in Counter(wanted.values()).items() if count > 1]:
        for key in [key for key in keys if wanted[key] in clashes]:
            parts = wanted[key].count(".") + 2
            longer = ".".join(key.split(".")[-parts:])
            if longer == wanted[key]:
                return {key: key for key in keys}
            wanted[key] = longer
    return wanted


def _shortest(key: str) -> str:
    group, _, last = key.rpartition(".")
    if last in GENERIC and group:
        return group.rpartition(".")[2]
    return last


def _hashable(value: Any) -> Hashable:
    # 1 == 1.0 == True in Python, but True differs from 1 in a configuration.
    if isinstance(value, bool):
        return ("bool", value)
    return value if isinstance(value, int | float | str) or value is None else repr(value)
