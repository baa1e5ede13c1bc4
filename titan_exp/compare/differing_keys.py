"""What differs between runs: exactly the keys of their resolved configurations whose values are not all the same."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_exp.config.errors.user_error import shown
from titan_exp.config.schema.identity_keys import has_effect

SEED = "experiment.seed"
"""Runs that differ in nothing else are repetitions of one experiment."""

LABEL_OF_MODEL = "model.name"
"""Without effect itself, it stands for the keys of a model's shape where it tells them apart."""

UNSAID = {"name", "mode", "enabled", "recipe"}
"""Last parts of a key that mean little without the group before them; for most the group alone says it."""

ABSENT = "not there"
"""Shown where a configuration does not have the key: an older version wrote it, or W&B left it out."""


@dataclass(frozen=True)
class DifferingKeys:
    """The keys that tell runs apart."""

    keys: tuple[str, ...]
    """Full names of the columns, in the order of the configuration."""
    short: Mapping[str, str]
    """What each is called where space is short: unambiguous among them."""
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that have no column since another column tells them, by that column."""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Every key that differs, those without a column of their own too."""
        return tuple(key for column in self.keys for key in (self.stands_for.get(column) or (column,)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of a nested configuration by its dotted key."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> DifferingKeys:
    """The keys in which configurations differ, less those that do not change what is computed, and the seed.

    Args:
        configs: nested configurations.
    """
    flat = [flatten(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for values in flat for key in values)
        if key != SEED and has_effect(key) and len({_hashable(values.get(key, ABSENT)) for values in flat}) > 1
    ]
    keys, stands_for = _fold_model(keys, flat)
    return DifferingKeys(tuple(keys), _short_names(keys), stands_for)


def value_text(value: Any) -> str:
    """A value as it is typed on the command line, numbers to ten digits."""
    return f"{value:.10g}" if isinstance(value, float) else shown(value)


def _fold_model(keys: list[str], flat: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """One column `model.name` for three or more keys of a model's shape, where equal names mean equal shapes."""
    shape = tuple(key for key in keys if key.startswith("model."))
    names = [values.get(LABEL_OF_MODEL) for values in flat]
    shapes = [tuple(_hashable(values.get(key, ABSENT)) for key in shape) for values in flat]
    if len(shape) < 3 or None in names or len(set(zip(names, shapes, strict=True))) != len(set(names)):
        return keys, {}
    place = keys.index(shape[0])
    return [*keys[:place], LABEL_OF_MODEL, *(key for key in keys[place:] if key not in shape)], {LABEL_OF_MODEL: shape}


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
    if last in UNSAID and group:
        return group.rpartition(".")[2]
    return last


def _hashable(value: Any) -> Hashable:
    # 1 and 1.0 and true are one value to Python, and the first two are one to a run.
    if isinstance(value, bool):
        return ("bool", value)
    return value if isinstance(value, int | float | str) or value is None else repr(value)
