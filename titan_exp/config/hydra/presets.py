"""Model presets: overrides that compose a model group of a given shape from the nearest preset."""

import dataclasses

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.nondefault import nondefault_overrides

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
