"""Configuration diff: keys whose resolved values differ between runs."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_exp.config.errors.user_error import shown
from titan_exp.config.schema.identity_keys import flatten, has_effect, is_among

SEED = "experiment.seed"
"""Runs that differ only in this key are repetitions."""

LABEL_OF_MODEL = "model.name"
"""Label key that replaces the model's shape keys if equal names mean equal shapes."""

GENERIC = {"name", "mode", "enabled", "recipe", "loss"}
"""Generic key names; the short name is the group's instead."""

RUNG_KEYS = ("training.stop_after", "checkpoint.continue_from")
"""Keys in which the rungs of one point of successive halving differ."""

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
    names: Sequence[Mapping[str, Any]] = ()
    """Values of the columns that others are folded into, by configuration."""

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All differing keys, including folded ones."""
        return tuple(key for column in self.keys for key in (self.stands_for.get(column) or (column,)))

    def label(self, values: Mapping[str, Any], keys: Iterable[str] | None = None) -> str:
        """Short names and values of all or some keys: `lr=0.003 tp=2`."""
        return " ".join(
            f"{self.short[key]}={value_text(values.get(key))}" for key in (self.keys if keys is None else keys)
        )


def differing_keys(
    configs: Sequence[Mapping[str, Any]],
    lists: Mapping[str, Sequence[str]] | None = None,
    choices: Sequence[Mapping[str, str]] = (),
    *,
    left_out: Sequence[str] = (),
) -> DifferingKeys:
    """Keys in which nested configurations differ, without the seed and keys that do not affect results.

    Keys that a named list of a study sets together become one column of its name: `lists` has their keys by list,
    `choices` for each configuration the chosen name by list; other axes may vary keys of a list, which keep their
    columns. So do the shape keys of a model with a name, and the keys that one choice of a group has and another lacks,
    such as those of an optimizer.
    """
    flat = [flatten(config) for config in configs]
    keys = [
        key
        for key in dict.fromkeys(key for values in flat for key in values)
        if key not in (SEED, *left_out)
        and has_effect(key)
        and len({_hashable(values.get(key, ABSENT)) for values in flat}) > 1
    ]
    folds = [
        (column, [key for key in keys if is_among(key, together)], [chosen.get(column) for chosen in choices])
        for column, together in (lists or {}).items()
    ]
    shape = [key for key in keys if key.startswith("model.")]
    folds.append((LABEL_OF_MODEL, shape, [values.get(LABEL_OF_MODEL) for values in flat]))
    folds += [(choice, own, [values.get(choice) for values in flat]) for choice, own in _keys_by_choice(keys, flat)]
    stands_for: dict[str, tuple[str, ...]] = {}
    named: list[dict[str, Any]] = [{} for _ in flat]
    for column, together, names in folds:
        folded = [key for key in together if key in keys]
        if column != LABEL_OF_MODEL:
            folded = [key for key in folded if _determines(names, [key], flat)]
        if len(folded) < (3 if column == LABEL_OF_MODEL else 2) or not _determines(names, folded, flat):
            continue
        first = keys.index(folded[0])
        keys = [*keys[:first], column, *(key for key in keys[first:] if key not in folded)]
        stands_for[column] = tuple(folded)
        for values, name in zip(named, names, strict=True):
            values[column] = name
    return DifferingKeys(tuple(keys), _short_names(keys), stands_for, named)


def _keys_by_choice(keys: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Differing choices of groups, each with itself and the differing keys of its group that some choice lacks."""
    for choice in (key for key in keys if key.rpartition(".")[2] in GENERIC and key != LABEL_OF_MODEL):
        group = choice.rpartition(".")[0]
        lacking = [key for key in keys if key.startswith(f"{group}.") and any(key not in values for values in flat)]
        yield choice, [choice, *lacking]


def value_text(value: Any) -> str:
    """Format a value as typed on the command line, numbers to ten digits."""
    return f"{value:.10g}" if isinstance(value, float) else shown(value)


def _determines(names: Sequence[Any], keys: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> bool:
    """True if all configurations have a name, and equal names mean equal values of the keys."""
    values = [tuple(_hashable(config.get(key, ABSENT)) for key in keys) for config in flat]
    return None not in names and len(set(zip(names, values, strict=True))) == len(set(names))


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
