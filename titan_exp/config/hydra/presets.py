"""The shipped model that is nearest to a shape, as the words to type for it."""

import dataclasses
from typing import Any

from omegaconf import OmegaConf

from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.compose import CONF_DIR, compose

NOT_THE_SHAPE = ("name", "init_std", "attention_backend", "options")
"""Keys of the model group that do not say which weights fit."""


def model_overrides(model: ModelConfig) -> list[str]:
    """Overrides that compose a model group of this shape: the nearest preset first, then what differs from it."""
    presets = [
        preset
        for preset in sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
        if compose([f"model={preset}"]).model.architecture == model.architecture
    ]
    found = min((_overrides(model, preset) for preset in presets), key=len)
    # A key that follows another one in the preset may have followed it too far.
    return [*found, *_differing(model, found)]


def _overrides(model: ModelConfig, preset: str) -> list[str]:
    return [f"model={preset}", *_differing(model, [f"model={preset}"])]


def _differing(model: ModelConfig, overrides: list[str]) -> list[str]:
    composed = OmegaConf.to_container(compose(overrides).model, resolve=True)
    there = _flat(composed)
    return [
        f"model.{key}={shown(value)}"
        for key, value in _flat(dataclasses.asdict(model)).items()
        if key not in NOT_THE_SHAPE and there.get(key) != value
    ]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
