"""A model family as a user would bring it: Llama's blocks in a subclass of the decoder that scales its embedding."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.llama import STATE_DICTS, block, spec, state_dict_map, violations

if TYPE_CHECKING:
    from torch import nn

__all__ = ["STATE_DICTS", "Config", "block", "huggingface", "model", "spec", "state_dict_map", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, with one field of its own."""

    embedding_scale: float
    """Factor of the embedding's output."""


def model(config: Config, *, seq_len: int, backend: Any) -> "nn.Module":
    """The subclass of the decoder."""
    from tests.models.own_decoder import ScaledDecoder

    blocks = {layer: block(config, layer, backend) for layer in range(config.layers)}
    return ScaledDecoder(spec(config), blocks, seq_len=seq_len, scale=config.embedding_scale)


def _from_config_json(values: Any, name: str) -> Config:
    fields: dict[str, Any] = vars(llama.huggingface.from_config(values, name)) | {"architecture": __name__}
    return Config(**fields, embedding_scale=float(values["embedding_scale"]))


huggingface = replace(
    llama.huggingface,
    to_config=lambda config: llama.huggingface.to_config(config) | {"embedding_scale": config.embedding_scale},
    from_config=_from_config_json,
)
