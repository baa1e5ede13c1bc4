"""Overrides of a resolved configuration that differ from the defaults, and of a model group from the nearest preset."""

import dataclasses
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.errors.user_error import UserError, in_quotes, shown
from titan_exp.config.extension import shipped_options
from titan_exp.config.foreign_file import read_yaml
from titan_exp.config.groups.experiment import Experiment, ModelConfig
from titan_exp.config.hydra.compose import compose, config_folder, default_overrides
from titan_exp.config.schema.component import KINDS, builtin_components, component_config
from titan_exp.config.schema.identity_keys import flatten, idle_keys, is_among, same_value
from titan_exp.config.schema.schema import defaults, hints

_PLAIN = re.compile(r"[\w/+.%@?*|-][\w/+.%@?*|:-]*", re.ASCII)
_NAME = re.compile(r"^(?:name|source): (\S+)$", re.MULTILINE)
_lock = Lock()
"""Hydra has one global state."""


def nondefault_overrides(values: Mapping[str, Any]) -> list[str]:
    """Overrides with which `titan-exp train` composes these resolved values, as few as possible: an option of a group
    if it leaves fewer keys to set, then keys. Keys that are not in `values` may have any value, and so may keys without
    effect, such as those of quantization without a recipe. Values are compared and never interpolated, so that a
    configuration may be another user's."""
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
    words: dict[str | None, tuple[int, int]] = {None: (left, left)}
    for name, option in options.items():
        keys = len(list(_differing({group: option}, group, wanted, plain)))
        words[name] = (1 + keys, keys)
    return min(words, key=words.__getitem__)


def _differing(
    raw: Mapping[str, Any], group: str, wanted: Mapping[str, Any], plain: DictConfig
) -> Iterator[tuple[str, Any]]:
    """Keys of a group, `+` before new ones, whose composed values are not the wanted ones."""
    composed, kind = flatten(raw.get(group) or {}, f"{group}."), hints(Experiment).get(group)
    name = wanted.get(f"{group}.{KINDS[group].key}") if group in KINDS else None
    if group in KINDS and name in builtin_components(group):  # a component of the user's has those of the base class
        kind = component_config(group, str(name))
    own = defaults(kind) if dataclasses.is_dataclass(kind) else {}
    groups = {key: dataclasses.asdict(one) for key, one in own.items() if dataclasses.is_dataclass(one)}  # type: ignore[arg-type]
    declared = flatten(own | groups, f"{group}.")
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
    """Uninterpolated values of the options of groups, by group and option; `groups` has the name that each group has in
    the configuration. One composition of all, each in a place of its own, is as fast as one of a single option."""
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


NOT_THE_SHAPE = ("name", "init_std", "attention_backend", "options")
"""Keys of the model group that do not determine which weights fit."""

NOT_PUBLISHED = ("balance", "fp32_router")
"""Keys of `model.moe` that a published `config.json` does not tell."""

DEFAULT = "llama_laptop"
"""Preset of the default configuration."""


def model_overrides(model: ModelConfig) -> list[str]:
    """Overrides that compose a model group of this shape: the nearest preset and the keys that differ from it."""
    shape = {key: value for key, value in dataclasses.asdict(model).items() if key not in NOT_THE_SHAPE}
    return nondefault_overrides({"model": shape}) or [f"model={DEFAULT}"]


def nearest_preset(model: ModelConfig) -> tuple[str, list[str]]:
    """Preset nearest to a published model, and overrides of its keys that differ, of those that `config.json` has."""
    shape = {key: value for key, value in dataclasses.asdict(model).items() if key not in (*NOT_THE_SHAPE, "mtp")}
    if isinstance(moe := shape.get("moe"), dict):
        shape["moe"] = {key: value for key, value in moe.items() if key not in NOT_PUBLISHED}
    if isinstance(rope := shape.get("rope"), dict) and rope.get("scaling") == "none":
        shape["rope"] = {key: rope[key] for key in ("theta", "scaling")}  # the others have no effect
    first, *rest = nondefault_overrides({"model": shape}) or [f"model={DEFAULT}"]
    if first.startswith("model="):
        return first.removeprefix("model="), rest
    return DEFAULT, [first, *rest]


class OptionValues:
    """Overrides for a primary configuration, with `GROUP=OPTION` replaced by the option's keys if the file has plain
    values for that group and no defaults list. Each key is an override of its own, so that those that follow may set
    it. `searchpath` is the override of `hydra.searchpath` for options of the user's own."""

    def __init__(self, primary: Path, searchpath: Sequence[str] = ()) -> None:
        self.groups: Mapping[Any, Any] = {}
        """Groups with plain values; empty for a file with a defaults list."""
        try:
            values = read_yaml(primary, "a configuration") if primary.is_file() else {}
        except UserError:
            values = {}  # Hydra says what is wrong
        if "defaults" not in values:
            self.groups = {name: group for name, group in values.items() if isinstance(group, dict)}
        self._searchpath = list(searchpath)
        self._found: dict[str, list[str]] = {}

    def __call__(self, overrides: Sequence[str]) -> list[str]:
        """Overrides with the values of their options."""
        found = []
        for override in overrides:
            if override.partition("=")[0] in self.groups and override not in self._found:
                self._found[override] = list(self._values(override))
            found += self._found.get(override, [override])
        return found

    def _values(self, override: str) -> Iterator[str]:
        group = override.partition("=")[0]
        try:
            option = OverridesParser.create().parse_override(override).value()
            composed = compose([*self._searchpath, override])[group] if isinstance(option, str) else None
        except (HydraException, OmegaConfBaseException):
            composed = None
        if composed is None:  # no option, as `group={key:value}`
            yield override
            return
        found = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(found, dict)
        # Not ~GROUP, which Hydra takes for a group where a folder of the user's has it.
        yield from (f"~{group}.{key}" for key in self.groups[group])
        yield from (f"+{key}={shown(value, quoted)}" for key, value in flatten({group: found}).items())
