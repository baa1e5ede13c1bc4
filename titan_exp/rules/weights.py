"""Weights that a run begins with: their model and tokenizer, as written beside them, and what the run changes of it.

Names and shapes do not tell one function from another: 4 heads of 16 features have the weights of 8 heads of 4 with
twice the key-value heads. Every field of a model counts, those of a family of the user's own too, unless it declares
another `Change` in its metadata.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titan_exp.config.checkpoint_files import huggingface_folder
from titan_exp.config.data_files import read_manifest, tokenizer_path, tokenizer_words
from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.experiment import Change, ModelConfig
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.component import current_names
from titan_exp.config.schema.identity_keys import flatten, is_among, same_value
from titan_exp.config.schema.schema import optional_fields
from titan_exp.config.schema.typed_config import read_values, validated
from titan_exp.models.convert.hf_config import FILE, config_json, foreign_type, from_huggingface, language_model
from titan_exp.models.convert.state_dict_map import checkpoint_formats
from titan_exp.models.spec.lookup import model_spec, mtp_depth, with_mtp_depth


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
    family the family alone. `theirs` may be the values of an older version. Raises UserError if the values are of other
    types."""
    found = theirs if isinstance(theirs, ModelConfig) else read_model(ours, theirs, where)
    if found.architecture != ours.architecture or type(found) is not type(ours):
        return [ModelChange("model.architecture", ours.architecture, found.architecture, Change.FUNCTION)]
    return list(_changes(ours.effective(), found.effective(), "model."))


def read_model(ours: ModelConfig, theirs: Mapping[str, Any], where: str) -> ModelConfig:
    """Model of the weights from its values, of our family; a key that they lack has its default, or our value. Raises
    UserError if a value is of another type."""
    values = current_names("model", theirs)
    if values.get("architecture") != ours.architecture:
        return replace(ours, architecture=str(values.get("architecture")))
    return validated(type(ours), _completed(ours, values), where)


def _completed(ours: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a group with those of ours for keys that they lack and that have no default."""
    needed = [one.name for one in fields(ours) if one.name not in optional_fields(type(ours))]
    found = {name: getattr(ours, name) for name in needed}
    for name in (one.name for one in fields(ours) if one.name in values):
        mine, value = getattr(ours, name), values[name]
        found[name] = _completed(mine, value) if is_dataclass(mine) and isinstance(value, Mapping) else value
    return found


def _changes(ours: Any, theirs: Any, prefix: str) -> Iterator[ModelChange]:
    for one in fields(ours):
        key, mine, other = f"{prefix}{one.name}", getattr(ours, one.name), getattr(theirs, one.name)
        declared: Any = one.metadata.get("change", Change.FUNCTION)
        if declared is Change.NOTHING:
            continue
        if is_dataclass(mine) and type(mine) is type(other):
            yield from _changes(mine, other, f"{key}.")
            continue
        if "compared" in one.metadata:
            mine, other = (one.metadata["compared"](model) for model in (ours, theirs))
        for inner, value, their in _values(mine, other):
            effect = declared if isinstance(declared, Change) else declared(ours, inner)
            if effect is not Change.NOTHING:
                yield ModelChange(f"{key}{inner}", value, their, effect)


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


ACCEPT = "checkpoint.accept_changes"
"""Key that accepts changes."""
TOKENIZER = "data.tokenizer"
"""Key of the tokenizer."""


@dataclass(frozen=True)
class GivenWeights:
    """Description of weights."""

    where: str
    """Run, folder or file that they are from, for messages."""
    model: ModelConfig | Mapping[str, Any]
    """Their model, or its values of whatever version."""
    tokenizer: str | None = None
    """`bytes`, or the path of their tokenizer's files; None if there is none."""


def given_weights(where: str, path: Path, ours: ModelConfig) -> GivenWeights | None:
    """Description beside a checkpoint, or in a Hugging Face folder; None if there is none. Raises UserError if it
    cannot be read, or our family does not read it."""
    if huggingface_folder(str(path)) is not None:
        values, _ = language_model(config_json(path))
        if "huggingface" not in checkpoint_formats(ours):
            reason = f"the weights of model.architecture={ours.architecture} have no names in Hugging Face's format"
            raise UserError(f"Cannot read {path}: {reason}.")
        found = from_huggingface(values, ours.name, ours.architecture)
        kind = foreign_type(values, ours.architecture)
        found = found if kind is None else replace(found, architecture=f"{kind} (model_type)")
        return GivenWeights(where, with_mtp_depth(found, 0) if mtp_depth(ours) == 0 else found, _tokenizer_in(path))
    if (path / FILE).is_file():
        values = read_object(path / FILE).get("model")
        return GivenWeights(where, _mapping(values, str(path / FILE)), _tokenizer_in(path))
    if (config := path.parent.parent / "config.yaml").is_file():
        return from_config(where, read_values(config))
    return None


def from_config(where: str, values: Mapping[str, Any]) -> GivenWeights:
    """Description in a run's configuration. Raises UserError if it has no model."""
    data = values.get("data")
    data = data if isinstance(data, Mapping) else {}
    tokenizer, stores = data.get("tokenizer"), data.get("paths")
    if tokenizer == "store":
        try:
            manifest = read_manifest(str(stores[0])) if isinstance(stores, list) and stores else None
        except UserError:  # it is gone
            manifest = None
        tokenizer = manifest and ("bytes" if manifest.tokenizer == "bytes" else str(manifest.path))
    return GivenWeights(where, _mapping(values.get("model"), where), tokenizer if isinstance(tokenizer, str) else None)


def model_misfits(
    ours: ModelConfig, given: GivenWeights, *, exclude: Sequence[str] | None = (), accepted: Sequence[str] = ()
) -> Iterator[Violation]:
    """Values of the model with which the weights, those that match `exclude` aside, have other shapes, or compute
    something that is not `accepted`. With None for `exclude` none can be left out."""
    changed = model_changes(ours, given.model, given.where)
    left_out = exclude or ()
    other = _other_shapes(ours, {one.key: one.theirs for one in changed}, left_out) or []
    patterns = shown([*left_out, *sorted({weight_pattern(name) for name in other})])
    beside = "" if exclude is None else f", or initialize these weights with checkpoint.initial_exclude='{patterns}'"
    refused, unfit = list[ModelChange](), list[ModelChange]()
    for one in (one for one in changed if one.change is Change.FUNCTION):
        own = _other_shapes(ours, {one.key: one.theirs}, ()) or []
        if set(own) & set(other):
            unfit.append(one)
        elif not is_among(one.key, accepted) and not (own and all(_matches(name, left_out) for name in own)):
            refused.append(one)
    for one in unfit:
        back = f"use {one.key}={shown(one.theirs)}{beside}"
        yield Violation(one.key, one.ours, f"{given.where} has {shown(one.theirs)}", back)
    accepting = f", or {ACCEPT}='{shown([*accepted, *(one.key for one in refused)])}' if you mean to change it"
    for one in refused:
        theirs = shown(one.theirs)
        reason = f"{given.where} has {theirs}, and with another value the same weights compute something else"
        yield Violation(one.key, one.ours, reason, f"use {one.key}={theirs}{accepting}")


def require_fit(ours: ModelConfig, given: GivenWeights, exclude: Sequence[str], accepted: Sequence[str]) -> None:
    """Raise UserError with the values of `model_misfits`, and overrides that compose the weights' own model."""
    if found := list(model_misfits(ours, given, exclude=exclude, accepted=accepted)):
        from titan_exp.config.hydra.nondefault import model_overrides

        known = isinstance(given.model, ModelConfig)
        fitting = f" They fit this one: {' '.join(model_overrides(given.model))}" if known else ""  # type: ignore[arg-type]
        raise UserError(f"The weights in {given.where} are of another model.{fitting}", found)


def tokenizer_misfit(
    data: DataConfig,
    model: ModelConfig,
    given: GivenWeights,
    *,
    exclude: Sequence[str] | None = (),
    accepted: Sequence[str] = (),
    same_data: bool = False,
) -> Iterator[Violation]:
    """A tokenizer in which words that the weights know have other ids, unless all rows of words are initialized. A run
    on the `same_data` cannot have another."""
    spec = model_spec(model)
    tables = [] if spec is None else [name for name, shape in spec.shapes.items() if shape[0] == model.vocab_size]
    initialized = bool(tables) and all(_matches(name, exclude or ()) for name in tables)
    is_accepted = is_among(TOKENIZER, accepted) and not same_data
    if not model.vocab_size or given.tokenizer is None or initialized or is_accepted:
        return
    try:
        path = tokenizer_path(data)
        if path == given.tokenizer:
            return
        ours, theirs = tokenizer_words(path), tokenizer_words(given.tokenizer)
    except UserError:
        return  # ours is the matter of other rules, and theirs may be gone
    moved = sum(ours.get(word) != number for word, number in theirs.items())
    if moved:
        words = f"{moved:,} of the {len(theirs):,} words that {given.where} knows"
        reason = f"this tokenizer has other ids, or none, for {words}"
        accepting = f"{ACCEPT}='{shown([*dict.fromkeys([*accepted, TOKENIZER])])}'"
        restart = " checkpoint.continue_data=restart" if same_data else ""
        remedy = f"use {TOKENIZER}={given.tokenizer}, or {accepting}{restart} if you mean to change it"
        yield Violation(TOKENIZER, data.tokenizer, reason, remedy)


def noted_changes(ours: ModelConfig, given: GivenWeights, accepted: Sequence[str] = ()) -> str:
    """Changes that may be meant, or that the user accepts, in one line; empty without any."""
    found = [
        f"{one.key}={shown(one.ours)} ({shown(one.theirs)} there)"
        for one in model_changes(ours, given.model, given.where)
        if one.change is Change.MEANT or is_among(one.key, accepted)
    ]
    return ", ".join(found)


def _other_shapes(ours: ModelConfig, values: Mapping[str, object], exclude: Sequence[str]) -> list[str] | None:
    """Weights with another shape, or none, in the model with other values at some keys; None if there is no such
    model."""
    if "model.architecture" in values:
        return None
    try:
        model = ours
        for key, value in values.items():
            model = _replaced(model, key.partition(".")[2], value)
        mine, other = model_spec(ours), model_spec(model)
    except (ArithmeticError, TypeError, ValueError, UserError):  # values that go together only
        return None
    if mine is None or other is None:
        return None
    one, two = mine.state_shapes, other.state_shapes
    return [name for name in one | two if one.get(name) != two.get(name) and not _matches(name, exclude)]


def _replaced(config: Any, key: str, value: object) -> Any:
    """A config with another value at a dotted key."""
    first, _, rest = key.partition(".")
    inner = getattr(config, first)
    if rest and not is_dataclass(inner):
        raise TypeError(f"{first} is not a group")
    return replace(config, **{first: _replaced(inner, rest, value) if rest else value})


def weight_pattern(name: str) -> str:
    """Pattern of a child's weights, or of those of one block."""
    parts = name.split(".")
    return ".".join([*parts[: 2 if parts[0] == "blocks" and len(parts) > 2 else 1], "*"]) if "." in name else name


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tokenizer_in(folder: Path) -> str | None:
    return str(folder) if (folder / "tokenizer.json").is_file() else None


def _mapping(values: object, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise UserError(f"{where} does not describe a model.")
    return values
