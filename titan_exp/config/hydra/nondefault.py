"""Overrides of a resolved configuration: options and values that differ from the defaults."""

import dataclasses
import pickle
import re
from collections.abc import Iterator, Mapping
from functools import cache
from threading import Lock
from typing import Any

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.errors.user_error import in_quotes, shown
from titan_exp.config.extension import shipped_options
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.hydra.compose import compose, config_folder, default_overrides
from titan_exp.config.schema.component import KINDS, builtin_components, component_config
from titan_exp.config.schema.identity_keys import flatten, idle_keys, is_among, same_value
from titan_exp.config.schema.schema import hints

_PLAIN = re.compile(r"[\w/+.%@?*|-][\w/+.%@?*|:-]*", re.ASCII)
_NAME = re.compile(r"^(?:name|source): (\S+)$", re.MULTILINE)
_lock = Lock()
"""Hydra has one global state."""


def nondefault_overrides(values: Mapping[str, Any]) -> list[str]:
    """Overrides with which `titan-exp train` composes these resolved values, as few as possible: an option of a group
    if it leaves fewer keys to set, then keys. Keys that are not in `values` may have any value, and so may keys without
    effect, such as those of quantization without a recipe.

    Values are compared and never interpolated, so that a configuration may be another user's.
    """
    wanted, defaults = flatten(values), _composed()
    plain = OmegaConf.create(_merged(_raw(defaults), _without_interpolations(values)))
    left = {group: len(list(_differing(_raw(defaults), group, wanted, plain))) for group in values}
    names = {group: wanted.get(f"{group}.name", wanted.get(f"{group}.source")) for group in values if left[group]}
    near = _options(tuple(names.items()))
    nearest = ((group, _nearest_option(group, left[group], near[group], wanted, plain)) for group in near)
    options = [f"{group}={name}" for group, name in nearest if name is not None]
    composed = _composed(*options) if options else defaults
    keys = (differing for group in values for differing in _differing(_raw(composed), group, wanted, plain))
    return [*options, *(f"{key}={shown(value, quoted)}" for key, value in keys)]


def _nearest_option(
    group: str, left: int, options: Mapping[str, Any], wanted: Mapping[str, Any], plain: DictConfig
) -> str | None:
    """Option of a group that leaves the fewest keys to set; None for the default, which leaves `left`."""
    best, found = (left, left), None
    for name, option in options.items():
        left = len(list(_differing({group: option}, group, wanted, plain)))
        if (1 + left, left) < best:
            best, found = (1 + left, left), name
    return found


def _differing(
    raw: Mapping[str, Any], group: str, wanted: Mapping[str, Any], plain: DictConfig
) -> Iterator[tuple[str, Any]]:
    """Keys of a group, `+` before new ones, whose composed values are not the wanted ones."""
    composed = flatten(raw.get(group) or {}, f"{group}.")
    declared = flatten(_declared(group, wanted), f"{group}.")
    inactive = idle_keys({**declared, **wanted})
    computed, mappings = [key for key, value in composed.items() if _interpolates(value)], dict[str, None]()
    for key, value in wanted.items():
        if not key.startswith(f"{group}.") or is_among(key, inactive):
            continue
        if mapping := next((name for name in computed if key.startswith(f"{name}.")), None):
            mappings[mapping] = None
        elif key not in composed:
            if key not in declared or not same_value(declared[key], value):
                yield f"+{key}", value
        elif not same_value(_value(composed[key], key, plain), value):
            yield key, value
    for key in mappings:  # computed as a whole, such as the content of a file
        value = OmegaConf.to_container(OmegaConf.select(plain, key))
        if not same_value(_value(composed[key], key, plain), value):
            yield key, value


def _value(raw: Any, key: str, plain: DictConfig) -> Any:
    """Value of a composed key where all other keys have the wanted values."""
    if not _interpolates(raw):
        return raw
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(plain, parent)
    before = node[name]
    node[name] = raw
    try:
        value = node[name]
    except OmegaConfBaseException:
        return raw
    finally:
        node[name] = before
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _declared(group: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a group's dataclass; of the base class for a component of the user's."""
    kind = hints(Experiment).get(group)
    name = wanted.get(f"{group}.{KINDS[group].key}") if group in KINDS else None
    if group in KINDS and name in builtin_components(group):
        kind = component_config(group, str(name))
    found = {}
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING:
            found[field.name] = default
            if dataclasses.is_dataclass(default) and not isinstance(default, type):
                found[field.name] = dataclasses.asdict(default)
    return found


def _composed(*options: str) -> DictConfig:
    with _lock:
        return pickle.loads(_pickled(options, tuple(default_overrides())))


@cache
def _pickled(options: tuple[str, ...], _: tuple[str, ...]) -> bytes:
    try:
        return pickle.dumps(compose(options))
    except (HydraException, OmegaConfBaseException):  # a mistake in conf/local is not the run's
        return pickle.dumps(compose(["~local@_global_", *options]))


@cache
def _options(groups: tuple[tuple[str, str | None], ...]) -> dict[str, dict[str, Any]]:
    """Uninterpolated values of the options of groups, by group and option; `groups` has the name that each group has
    in the configuration.

    One composition of all, each in a place of its own, is as fast as one of a single option.
    """
    found: dict[str, dict[str, Any]] = {group: {} for group, _ in groups}
    options = [(group, option) for group, name in groups for option in _options_named(group, name)]
    if options:
        with _lock, config_folder():
            words = [f"+{group}@option{place}={option}" for place, (group, option) in enumerate(options)]
            raw = _raw(hydra_compose(None, words))
        for place, (group, option) in enumerate(options):
            found[group][option] = raw[f"option{place}"]
    return found


def _options_named(group: str, name: str | None) -> list[str]:
    """Options of a group without those that set another name, if any sets `name`."""
    texts = {option: path.read_text() for option, path in shipped_options(group).items()}
    names = {option: found[1] if (found := _NAME.search(text)) else None for option, text in texts.items()}
    near = {name, None} if name and name in names.values() else {*names.values()}
    return [option for option, text in texts.items() if "@package _global_" not in text and names[option] in near]


def _raw(cfg: DictConfig) -> dict[str, Any]:
    found: dict = OmegaConf.to_container(cfg, resolve=False)  # type: ignore[assignment]
    return found


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries with the values of `over` in place of others."""
    found = dict(values)
    for key, value in over.items():
        before = found.get(key)
        found[key] = _merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return found


def _interpolates(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _without_interpolations(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_interpolations(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_interpolations(part) for part in value]
    return "" if _interpolates(value) else value


def quoted(text: str) -> str:
    """String as an override's value, quoted if Hydra would read another value."""
    try:
        float(text)
    except ValueError:
        if _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false"):
            return text
    return in_quotes(text)
