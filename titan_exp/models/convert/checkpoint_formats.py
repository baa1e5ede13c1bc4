"""Checkpoint formats of other tools, by what a model's family declares."""

from collections.abc import Sequence
from typing import Literal

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.schema.component import component
from titan_exp.models.convert.state_dict_map import StateDictMap

CheckpointFormat = Literal["huggingface", "llama", "torchtune", "diffusers", "bfl"]
"""Parameter names of Hugging Face, of Meta's `consolidated.*.pth`, of torchtune, of diffusers, or of Black Forest
Labs' `*.safetensors`."""


def checkpoint_formats(config: ModelConfig) -> Sequence[str]:
    """Checkpoint formats of other tools for this model; empty if its family has no state-dict map.

    A family that lists no `STATE_DICTS` has Hugging Face's names if it has a `huggingface` as well.
    """
    family = component("model", config.architecture)
    has_config = hasattr(family, "huggingface")
    formats = getattr(family, "STATE_DICTS", ("huggingface",)) if hasattr(family, "state_dict_map") else ()
    return tuple(form for form in formats if has_config or form != "huggingface")


def state_dict_map(config: ModelConfig, form: CheckpointFormat) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters; the family must have the format."""
    return component("model", config.architecture).state_dict_map(config, form)
