"""Model presets: overrides that compose a model group of a given shape from the nearest preset."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.hydra.compose import compose
from titan_exp.config.hydra.nondefault import nondefault_overrides, quoted
from titan_exp.config.paths.foreign_file import read_yaml
from titan_exp.config.schema.identity_keys import flatten

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
        return [word for override in overrides for word in self._of(override)]

    def _of(self, override: str) -> list[str]:
        if override.partition("=")[0] not in self.groups:
            return [override]
        if override not in self._found:
            self._found[override] = list(self._values(override))
        return self._found[override]

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
