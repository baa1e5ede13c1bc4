"""Model presets: overrides that compose a model group of a given shape from the nearest preset."""

import dataclasses

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.nondefault import nondefault_overrides

NOT_THE_SHAPE = ("name", "init_std", "attention_backend", "options")
"""Keys of the model group that do not determine which weights fit."""


def model_overrides(model: ModelConfig) -> list[str]:
    """Overrides that compose a model group of this shape: the nearest preset and the keys that differ from it."""
    shape = {key: value for key, value in dataclasses.asdict(model).items() if key not in NOT_THE_SHAPE}
    return nondefault_overrides({"model": shape}) or ["model=llama_laptop"]
