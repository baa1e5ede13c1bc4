"""Changes of a model between a run and the weights that it begins with, read off its typed configuration.

Every field counts, those of a family of the user's own too, unless it declares another `Change` in its metadata.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.config.groups.model import Change, ModelConfig
from titan_exp.config.schema.component import current_names
from titan_exp.config.schema.identity_keys import flatten, same_value
from titan_exp.config.schema.typed_config import validated


@dataclass(frozen=True)
class ModelChange:
    """Key of the model whose value differs from that of the weights."""

    key: str
    """Dotted key (`model.context`)."""
    ours: object
    """Value of the run."""
    theirs: object
    """Value of the weights; None where they have no such key."""
    change: Change
    """Effect on what the weights compute."""


def model_changes(ours: ModelConfig, theirs: ModelConfig | Mapping[str, Any], where: str) -> list[ModelChange]:
    """Fields of a model with other values than those of the weights, with an effect on what these compute; of another
    family the family alone. `theirs` may be the values of an older version.

    Raises:
        UserError: the values are of other types.
    """
    found = theirs if isinstance(theirs, ModelConfig) else read_model(ours, theirs, where)
    if found.architecture != ours.architecture or type(found) is not type(ours):
        return [ModelChange("model.architecture", ours.architecture, found.architecture, Change.FUNCTION)]
    return list(_changes(ours.effective(), found.effective(), "model."))


def read_model(ours: ModelConfig, theirs: Mapping[str, Any], where: str) -> ModelConfig:
    """Model of the weights from its values, of our family; a key that they lack has its default, or our value.

    Raises:
        UserError: a value is of another type.
    """
    values = current_names("model", theirs)
    if values.get("architecture") != ours.architecture:
        return dataclasses.replace(ours, architecture=str(values.get("architecture")))
    return validated(type(ours), _completed(ours, values), where)


def _completed(ours: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a group with those of ours for keys that they lack and that have no default."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(ours):
        mine = getattr(ours, one.name)
        if dataclasses.is_dataclass(mine) and isinstance(values.get(one.name), Mapping):
            found[one.name] = _completed(mine, values[one.name])
        elif one.name in values:
            found[one.name] = values[one.name]
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            found[one.name] = mine
    return found


def _changes(ours: Any, theirs: Any, prefix: str) -> Iterator[ModelChange]:
    for one in dataclasses.fields(ours):
        key, mine, other = f"{prefix}{one.name}", getattr(ours, one.name), getattr(theirs, one.name)
        declared: Any = one.metadata.get("change", Change.FUNCTION)
        if declared is Change.NOTHING:
            continue
        if dataclasses.is_dataclass(mine) and type(mine) is type(other):
            yield from _changes(mine, other, f"{key}.")
            continue
        if "compared" in one.metadata:
            mine, other = (one.metadata["compared"](model) for model in (ours, theirs))
        yield from (
            ModelChange(f"{key}{inner}", value, their, effect)
            for inner, value, their in _values(mine, other)
            if (effect := _effect(declared, ours, inner)) is not Change.NOTHING
        )


def _effect(declared: Any, ours: Any, inner: str) -> Change:
    return declared if isinstance(declared, Change) else declared(ours, inner)


def _values(mine: object, other: object) -> Iterator[tuple[str, object, object]]:
    """Differing values of a field, those of a mapping key by key."""
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        flat, their = flatten(mine, "."), flatten(other, ".")
        for key in flat | their:
            if not _same(flat.get(key), their.get(key)):
                yield key, flat.get(key), their.get(key)
    elif not _same(mine, other):
        yield "", mine, other


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-9)
    return same_value(value, other)
