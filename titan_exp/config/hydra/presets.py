"""Model presets: overrides that compose a model group of a given shape from the nearest preset."""

import dataclasses

from omegaconf import OmegaConf

from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.compose import CONF_DIR, compose
from titan_exp.config.schema.config_diff import flatten

NOT_THE_SHAPE = ("name", "init_std", "attention_backend", "options")
"""Keys of the model group that do not determine which weights fit."""


def model_overrides(model: ModelConfig) -> list[str]:
    """Overrides that compose a model group of this shape: the nearest preset and the keys that differ from it."""
    presets = [
        preset
        for preset in sorted(path.stem for path in (CONF_DIR / "model").glob("*.yaml"))
        if compose([f"model={preset}"]).model.architecture == model.architecture
    ]
    candidates = ([f"model={preset}", *_differing(model, [f"model={preset}"])] for preset in presets)
    found = min(candidates, key=len)
    # Preset keys that interpolate an overridden key may have changed with it.
    return [*found, *_differing(model, found)]


def _differing(model: ModelConfig, overrides: list[str]) -> list[str]:
    composed: dict = OmegaConf.to_container(compose(overrides).model, resolve=True)  # type: ignore[assignment]
    present = flatten(composed)
    return [
        f"model.{key}={shown(value)}"
        for key, value in flatten(dataclasses.asdict(model)).items()
        if key not in NOT_THE_SHAPE and present.get(key) != value
    ]
